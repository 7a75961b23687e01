"""The command line: its jobs, and what all of them accept.

Nothing heavy is imported: `m4 --help` answers at once.
"""

import argparse
import functools
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any

from m4.cli.data_arguments import DATA_JOBS
from m4.cli.decode_arguments import add_audit, add_text
from m4.cli.job_arguments import (
    TOGETHER,
    add_atlas,
    add_average,
    add_checkpoint,
    add_collectives,
    add_common,
    add_debug,
    add_export,
    add_new,
    add_plan,
    add_run,
    add_translate,
    add_verify,
    add_watch,
)
from m4.parallel.distributed_options import DistributedOptions, distributed_options
from m4.settings import InputError

JOBS = {
    "new": "look at a folder of sentence pairs, and write a config for it",
    "train": "train the model, from its latest checkpoint where there is one",
    "baselines": "train the bilingual baselines that are missing",
    "decode": "translate the test sets, or files of text, with the trained model",
    "eval": "score the test sets, translating them first if needed; --watch: each checkpoint",
    "score": "log-probability of the test sets' references, or of your own translations",
    "report": "scores, ΔBLEU table, plot and report.html from what is decoded; trains nothing",
    "demo": "run all steps: train, baselines, decode, report",
    "average": "make a run folder with the mean of several checkpoints' parameters",
    "translate": "translate the arguments, or standard input line by line",
    "data": "build or inspect the corpus: " + ", ".join(DATA_JOBS),
    "watch": "show a training run from its files: loss, speed, experts, time left, scores",
    "checkpoint": "list, verify, inspect or convert the checkpoints of a run",
    "export": "a run's model as a checkpoint that T5X trains on from",
    "atlas": "which language goes to which expert: tables, atlas.png",
    "plan": "ahead-of-time compile for a TPU pod (no TPU needed): memory, traffic, time, cost",
    "collectives": "what partitioned operators send: Table 4 of GShard, compiled here; or, with a "
    "config, what its training step sends and holds",
}

_EXAMPLES = {
    "new": "m4 new my_corpus --out=mine.gin",
    "train": "m4 train --gin_file=gin_configs/demo.gin --gin.TRAIN_STEPS=2000",
    "baselines": "m4 baselines --model_dir=runs/demo",
    "decode": "m4 decode --model_dir=runs/demo",
    "eval": "m4 eval --model_dir=runs/demo --watch",
    "score": "m4 score --model_dir=runs/demo --split=dev",
    "report": "m4 report --model_dir=runs/demo",
    "demo": "m4 demo --gin_file=gin_configs/demo.gin --model_dir=runs/mine",
    "translate": 'm4 translate --model_dir=runs/demo --to=gl "3 weeks ago"',
    "average": "m4 average runs/demo --last=5",
    "watch": "m4 watch --model_dir=gs://bucket/run",
    "checkpoint": "m4 checkpoint verify runs/demo",
    "export": "m4 export runs/demo --format=t5x --output=exported",
    "atlas": "m4 atlas --model_dir=runs/demo --split=test",
    "plan": "m4 plan --gin_file=gin_configs/moe_128e_12l.gin --topology=v3:8x8",
    "collectives": "m4 collectives --gin_file=gin_configs/demo.gin --devices=8",
    "prepare": "m4 data prepare --gin_file=gin_configs/demo.gin",
    "preview": "m4 data preview --gin_file=gin_configs/demo.gin",
    "vocabulary": "m4 data vocabulary --gin_file=gin_configs/demo.gin",
    "audit": "m4 data audit --gin_file=gin_configs/demo.gin --stages=all",
}
_GIN = (
    "Any setting can be given as --gin.NAME=VALUE: --gin.TRAIN_STEPS=2000,\n"
    "--gin.schedules.rsqrt.peak=1e-3, --gin.MODEL_DIR=runs/mine. Flags may be written with - for _."
)

# What T5X's users type, and what it is called here.
_T5X_JOBS = {"infer": "decode", "evaluate": "eval", "finetune": "train", "pretrain": "train"}
_T5X_FLAGS = {
    "--run_mode": "the job is the first word: m4 train, m4 eval, m4 decode",
    "--gin_bindings_file": "give a second --gin_file",
    "--tfds_data_dir": "set tfds.Tfds.data_dir in the config",
}

# Flags of earlier versions.
_RENAMED = {
    "--start_seconds": "--join_timeout_s",
    "--job": "--program",
    "--keep": "--reuse",
}


# Jobs that read no config, with their arguments.
_WITHOUT_CONFIG = {"atlas": add_atlas, "checkpoint": add_checkpoint, "watch": add_watch,
                   "new": add_new, "export": add_export}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The arguments of every job."""
    top = argparse.ArgumentParser(
        prog="m4",
        description="Train, evaluate and use massively multilingual translation models.",
        epilog=_GIN,
    )
    top.add_argument("--version", action="version", version=f"m4 {version()}")
    commands = top.add_subparsers(dest="job", required=True, metavar="job")
    for name, text in JOBS.items():
        job = _command(commands, name, text)
        if name == "data":
            looks = job.add_subparsers(dest="look", required=True, metavar="what")
            for look, about in DATA_JOBS.items():
                part = _command(looks, look, about.help)
                add_common(part)
                for option, settings in about.options.items():
                    part.add_argument(f"--{option}", **settings)
        elif name in _WITHOUT_CONFIG:
            add_debug(job)
            _WITHOUT_CONFIG[name](job)
        else:
            add_common(job)
            {
                "plan": add_plan,
                "collectives": add_collectives,
                "translate": add_translate,
                "average": add_average,
            }.get(name, functools.partial(add_run, name))(job)
            if name == "decode":
                add_text(job)
                add_audit(job)
            if name not in ("plan", "collectives"):
                add_verify(job)
    return top


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text,
        description=_said(text),
        epilog=_epilog(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def distributed_options_of(
    parsed: argparse.Namespace, environment: Mapping[str, str]
) -> DistributedOptions | None:
    """How this process joins others; None: it is alone. ValueError: see `distributed_options`."""
    if parsed.job not in TOGETHER:
        return None
    return distributed_options(
        environment,
        multiprocess=parsed.multiprocess,
        coordinator_address=parsed.coordinator_address,
        process_count=parsed.process_count,
        process_index=parsed.process_index,
        heartbeat_seconds=parsed.heartbeat_seconds,
        join_timeout_s=parsed.join_timeout_s,
    )


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits off --gin.NAME=VALUE: (other arguments, ["NAME = VALUE", ...]); --a-b is --a_b.

    Raises:
        InputError: T5X's or an earlier version's name of a flag or job, with the one of today.
    """
    others, bindings = [], []
    for position, argument in enumerate(arguments):
        if match := re.match(r"--gin\.([^=]+)=(.*)", argument, re.DOTALL):
            bindings.append(f"{match[1]} = {match[2]}")
            continue
        if argument == "--":
            return [*others, *arguments[position:]], bindings
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = "--" + name[2:].replace("-", "_")
            argument = name + equals + value
            if new := _RENAMED.get(name):
                raise InputError(f"{name} is now {new}")
            if new := _T5X_FLAGS.get(name):
                raise InputError(f"{name}: {new}")
        elif not others and argument in _T5X_JOBS:
            raise InputError(f"{argument}: m4's name is m4 {_T5X_JOBS[argument]}")
        others.append(argument)
    return others, bindings


def version() -> str:
    """The installed version of m4."""
    try:
        return importlib.metadata.version("m4")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _said(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _epilog(job: str) -> str:
    example = f"Example: {_EXAMPLES[job]}" if job in _EXAMPLES else ""
    return "\n".join(filter(None, [example, "" if job in _WITHOUT_CONFIG else _GIN]))
