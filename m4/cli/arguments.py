"""The arguments of the command line: a job each, and the table of `m4 data`.

Nothing heavy is imported: `m4 --help` answers at once.
"""

import argparse
import functools
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m4.parallel.distributed_options import DistributedOptions, distributed_options
from m4.settings import InputError


class DataJob(NamedTuple):
    """What `m4 data <name>` does, and its own options: argparse's arguments by name."""

    help: str
    options: Mapping[str, Mapping[str, Any]] = {}


# Each is the function of that name in m4/jobs/data/<name>.py, called with the experiment and these.
DATA_JOBS = {
    "prepare": DataJob(
        "build the corpus in MODEL_DIR/data, or in experiment.Data.data_dir for several runs",
        {
            "rebuild": {
                "action": "store_true",
                "help": "replace a corpus of other settings, for all runs that share it",
            }
        },
    ),
    "preview": DataJob(
        "how often each language would be seen: data_preview.html, .png, .json",
        {
            "temperatures": {
                "default": "1,2,3,5,inf",
                "help": "to compare the sampler with (default: %(default)s)",
            },
            "most_epochs": {
                "type": float,
                "default": 16.0,
                "help": "warn of languages that are repeated more often (default: %(default)s)",
            },
        },
    ),
    "vocabulary": DataJob(
        "what the vocabulary makes of each language: pieces a sentence, bytes",
        {
            "sentences": {"type": int, "default": 2000, "help": "of each language (2000)"},
            "warn_above": {"type": float, "default": 0.01, "help": "share of bytes (0.01)"},
        },
    ),
    "audit": DataJob(
        "clean the corpus: what is dropped and why; data_report.html",
        {
            "stages": {
                "choices": ["configured", "all"],
                "default": "configured",
                "help": "the stages that the config names, or all that there are",
            },
            "list": {
                "nargs": "?",
                "const": "",
                "metavar": "REASON",
                "help": "write dropped.jsonl.gz: every dropped pair, or those of a stage or reason",
            },
        },
    ),
}

JOBS = {
    "train": "train the model, from its latest checkpoint where there is one",
    "baselines": "train the bilingual baselines that are missing",
    "decode": "translate the test sets with the trained model",
    "eval": "score the test sets, translating them first if needed",
    "report": "scores, ΔBLEU table, plot and report.html from what is decoded; trains nothing",
    "demo": "run all steps: train, baselines, decode, report",
    "translate": "translate the arguments, or standard input line by line",
    "data": "build or inspect the corpus: " + ", ".join(DATA_JOBS),
    "watch": "show a training run from its files: loss, speed, experts, time left, scores",
    "atlas": "which language goes to which expert: tables, atlas.png",
    "plan": "ahead-of-time compile for a TPU pod (no TPU needed): memory, traffic, time, cost",
    "collectives": "what partitioned operators send: Table 4 of GShard, compiled here; or, with a "
    "config, what its training step sends and holds",
}

_EXAMPLES = {
    "train": "m4 train --gin_file=gin_configs/demo.gin --gin.TRAIN_STEPS=2000",
    "baselines": "m4 baselines --model_dir=runs/demo",
    "decode": "m4 decode --model_dir=runs/demo",
    "eval": "m4 eval --model_dir=runs/demo",
    "report": "m4 report --model_dir=runs/demo",
    "demo": "m4 demo --gin_file=gin_configs/demo.gin --model_dir=runs/mine",
    "translate": 'm4 translate --model_dir=runs/demo --to=gl "3 weeks ago"',
    "watch": "m4 watch --model_dir=gs://bucket/run",
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

# The jobs that several processes can be started with, and those whose work they share; the others
# are the primary's.
TOGETHER = ("train", "baselines", "decode", "eval", "report", "demo")
SHARED = ("train", "decode", "eval")


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
                _add_common(part)
                for option, settings in about.options.items():
                    part.add_argument(f"--{option}", **settings)
        elif name in ("atlas", "watch"):  # they read no config
            _add_debug(job)
            (_add_atlas if name == "atlas" else _add_watch)(job)
        else:
            _add_common(job)
            {"plan": _add_plan, "collectives": _add_collectives, "translate": _add_translate}.get(
                name, functools.partial(_add_run, name)
            )(job)
    return top


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text,
        description=_said(text),
        epilog=_epilog(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_run(name: str, job: argparse.ArgumentParser) -> None:
    """The arguments of jobs that work in a run's folder."""
    if name in TOGETHER:
        _add_processes(job)
    if name in ("train", "demo"):
        job.add_argument("--fresh", action="store_true", help="remove MODEL_DIR and start over")
        job.add_argument(
            "--init_from",
            metavar="RUN[@STEP]",
            help="begin from the model of another run's folder (INITIAL_CHECKPOINT_PATH)",
        )
    if name in ("decode", "eval"):
        job.add_argument("--split", choices=["test", "dev"], default="test", help="(%(default)s)")
        job.add_argument(
            "--step",
            type=int,
            help="a checkpoint that is kept; results in decodes/STEP (the latest)",
        )
    job.add_argument("--compare", choices=["dense"], help="also train a dense model for comparison")


def _add_translate(job: argparse.ArgumentParser) -> None:
    job.add_argument("--to", required=True, help="target language, e.g. gl")
    job.add_argument("text", nargs="*", help="without text: standard input")


def _add_atlas(job: argparse.ArgumentParser) -> None:
    job.add_argument("--model_dir", help="the folder of a model with experts")
    job.add_argument(
        "--split",
        choices=["train", "test"],
        default="train",
        help="who went where in training, or in the test sets and their translations",
    )


def _add_watch(job: argparse.ArgumentParser) -> None:
    job.add_argument("--model_dir", help="the folder of the run")
    job.add_argument(
        "--seconds", type=float, default=10.0, help="between two looks (default: %(default)s)"
    )
    job.add_argument("--once", action="store_true", help="show it once")


def _add_collectives(job: argparse.ArgumentParser) -> None:
    """What compiles operators, or one step of a config."""
    job.add_argument(
        "--devices",
        help="fake CPU devices, several numbers of them for the table "
        "(2,4,8,16,32,64), one with a config (8)",
    )
    job.add_argument(
        "--languages",
        type=int,
        default=10,
        help="that the config's corpus has, where it does not name them (%(default)s)",
    )
    job.add_argument("--output", type=Path, help="a file of JSON to write as well")


def _add_common(job: argparse.ArgumentParser) -> None:
    """The arguments of every job that reads a config."""
    _add_debug(job)
    group = job.add_argument_group("configuration")
    group.add_argument("--gin_file", action="append", default=[], help="config; may be repeated")
    group.add_argument(
        "--gin_search_paths", default=".", help="comma-separated folders (default: %(default)s)"
    )
    group.add_argument(
        "--gin_bindings",
        action="append",
        default=[],
        metavar="'NAME = VALUE'",
        help="a binding, as --gin.NAME=VALUE; may be repeated",
    )
    group.add_argument(
        "--model_dir", help="run folder (MODEL_DIR); without --gin_file its saved config is used"
    )
    group.add_argument(
        "--allow_module",
        action="append",
        default=[],
        metavar="NAME[=FOLDER]",
        help="a module outside m4 that the saved config of a run folder may import (and run); "
        "FOLDER: where it is, if not in the working folder",
    )


def _add_processes(job: argparse.ArgumentParser) -> None:
    """How one of several processes finds the others; T5X's names where it has some."""
    group = job.add_argument_group("several processes", "one a host, all with the same command")
    group.add_argument(
        "--multiprocess",
        action="store_true",
        help="join the processes that the cluster (TPU, GKE, Slurm, Open MPI) names; TPU hosts "
        "do so by default where JAX_PLATFORMS begins with tpu",
    )
    group.add_argument("--coordinator_address", metavar="HOST:PORT", help="host:port of process 0")
    group.add_argument("--process_count", type=int, metavar="N", help="number of processes")
    group.add_argument("--process_index", type=int, metavar="I", help="index of this one, from 0")
    group.add_argument(
        "--heartbeat_seconds",
        type=int,
        default=30,
        metavar="S",
        help="seconds without a heartbeat until a process counts as dead (default: %(default)s)",
    )
    group.add_argument(
        "--join_timeout_s",
        type=int,
        metavar="S",
        help="seconds to wait for all processes at start-up (default: 45; 300 with --multiprocess)",
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


def _add_plan(job: argparse.ArgumentParser) -> None:
    """What is planned, and for which machine."""
    job.add_argument(
        "--topology",
        help="chip and grid, v4:4x4x4; slices of it, 2*v5e:16x16; or GPU, nodes and GPUs a node, "
        "h100:16x8 (v3:8x8)",
    )
    job.add_argument(
        "--price_per_chip_hour",
        type=float,
        help="what an hour of a chip, or a GPU, costs: the plan multiplies it out",
    )
    job.add_argument(
        "--program",
        choices=["train", "decode"],
        default="train",
        help="which program to compile (%(default)s)",
    )
    job.add_argument(
        "--languages",
        type=int,
        default=100,
        help="how many, where the config does not name them (%(default)s)",
    )
    job.add_argument(
        "--output",
        type=Path,
        default=Path("runs/plans"),
        help="folder of the reports (%(default)s)",
    )
    job.add_argument(
        "--sweep", action="store_true", help="the GShard paper's whole family, in one table"
    )
    job.add_argument(
        "--configs", default="gin_configs", help="with --sweep: folder of its configs (%(default)s)"
    )
    job.add_argument(
        "--reuse",
        action="store_true",
        help="with --sweep: also reuse plans made by other versions of m4's code",
    )
    # For the process that compiles: the file that it writes.
    job.add_argument("--facts", type=Path, help=argparse.SUPPRESS)


def _add_debug(job: argparse.ArgumentParser) -> None:
    job.add_argument("--debug", action="store_true", help="show where an error was raised")


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
    return "\n".join(filter(None, [example, "" if job == "atlas" else _GIN]))
