"""The arguments of the command line: a job each, and the table of `m4 data`.

Nothing heavy is imported: `m4 --help` answers at once.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m4.parallel.distributed_options import DistributedOptions, distributed_options


class DataJob(NamedTuple):
    """What `m4 data <name>` does, and its own options: argparse's arguments by name."""

    help: str
    options: Mapping[str, Mapping[str, Any]] = {}


# Each is the function of that name in m4/data_jobs.py, called with the setup and the options.
DATA_JOBS = {
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
    "eval": "score the translations (they are made first where they are missing)",
    "report": "scores, ΔBLEU table, plot and report.html from what is decoded",
    "atlas": "which language goes to which expert: tables, atlas.png",
    "collectives": "what partitioned operators send: Table 4 of GShard, compiled here; or, with a "
    "config, what its training step sends and holds",
    "plan": "compile for a TPU pod that is not there: memory, traffic, time, cost",
    "demo": "all of it, in turn: train, baselines, decode, report",
    "data": "look at the corpus, without training: " + ", ".join(DATA_JOBS),
    "translate": "translate the arguments, or standard input line by line",
}


# The jobs that several processes can be started with, and those whose work they share; the others
# are the first one's.
TOGETHER = ("train", "baselines", "decode", "eval", "report", "demo")
SHARED = ("train", "decode", "eval")


def parser() -> argparse.ArgumentParser:
    """The arguments of every job."""
    top = argparse.ArgumentParser(
        prog="m4",
        description="Train, evaluate and use massively multilingual translation models.",
        epilog="Any gin value can be set on the command line: --gin.TRAIN_STEPS=2000 "
        "--gin.MODEL_DIR='\"runs/mine\"' (text needs its own quotes).",
    )
    commands = top.add_subparsers(dest="job", required=True, metavar="job")
    for name, text in JOBS.items():
        job = commands.add_parser(name, help=text, description=text)
        if name == "data":
            looks = job.add_subparsers(dest="look", required=True, metavar="what")
            for look, about in DATA_JOBS.items():
                part = looks.add_parser(look, help=about.help, description=about.help)
                _add_common(part)
                for option, settings in about.options.items():
                    part.add_argument(f"--{option}", **settings)
            continue
        if name == "collectives":  # compiles operators, or one step of a config
            _add_common(job)
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
            continue
        if name == "atlas":  # reads counts and no config
            _add_debug(job)
            job.add_argument("--model_dir", help="the folder of a model with experts")
            job.add_argument(
                "--split",
                choices=["train", "test"],
                default="train",
                help="who went where in training, or in the test sets and their translations",
            )
            continue
        _add_common(job)
        if name == "plan":
            _add_plan(job)
            continue
        if name in TOGETHER:
            _add_processes(job)
        if name in ("train", "demo"):
            job.add_argument("--fresh", action="store_true", help="remove MODEL_DIR and start over")
        if name != "translate":
            job.add_argument(
                "--compare", choices=["dense"], help="the same model without experts, beside it"
            )
        if name == "translate":
            job.add_argument("--to", required=True, help="target language, e.g. gl")
            job.add_argument("text", nargs="*", help="without text: standard input")
    return top


def _add_common(job: argparse.ArgumentParser) -> None:
    """The arguments of every job that reads a config."""
    _add_debug(job)
    job.add_argument("--gin_file", action="append", default=[], help="config; may be repeated")
    job.add_argument("--gin_search_paths", default=".", help="comma-separated folders")
    job.add_argument("--gin_bindings", action="append", default=[], metavar="'NAME = VALUE'")
    job.add_argument("--model_dir", help="MODEL_DIR; alone: with the config that is there")


def _add_processes(job: argparse.ArgumentParser) -> None:
    """How one of several processes finds the others; T5X's names where it has some."""
    group = job.add_argument_group("several processes", "one a host, all with the same command")
    group.add_argument(
        "--multiprocess",
        action="store_true",
        help="join the processes that the cluster (TPU, GKE, Slurm, Open MPI) tells of; TPU hosts "
        "do it unasked where JAX_PLATFORMS begins with tpu",
    )
    group.add_argument(
        "--coordinator_address", metavar="HOST:PORT", help="where the first process answers"
    )
    group.add_argument("--process_count", type=int, metavar="N", help="how many there are")
    group.add_argument("--process_index", type=int, metavar="I", help="which this one is, from 0")
    group.add_argument(
        "--heartbeat_seconds",
        type=int,
        default=30,
        metavar="S",
        help="a process that is silent for so long is dead and ends the others (%(default)s)",
    )
    group.add_argument(
        "--start_seconds",
        type=int,
        metavar="S",
        help="so long the processes wait for each other in the beginning (45; 300 where the "
        "cluster tells of them)",
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
        join_timeout_s=parsed.start_seconds,
    )


def _add_plan(job: argparse.ArgumentParser) -> None:
    """What is planned, and for which machine."""
    job.add_argument(
        "--topology",
        help="chip and grid, v4:4x4x4, or GPU, nodes and GPUs a node, h100:16x8 (v3:8x8)",
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


def gin_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits off --gin.NAME=VALUE: (other arguments, ["NAME = VALUE", ...])."""
    others, bindings = [], []
    for argument in arguments:
        if match := re.match(r"--gin\.([^=]+)=(.*)", argument, re.DOTALL):
            bindings.append(f"{match[1]} = {match[2]}")
        else:
            others.append(argument)
    return others, bindings
