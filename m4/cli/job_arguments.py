"""The arguments of each job."""

import argparse
from pathlib import Path

# The jobs that several processes can be started with, and those whose work they share; the others
# are the primary's.
TOGETHER = ("train", "baselines", "decode", "eval", "report", "demo")
SHARED = ("train", "decode", "eval")


def add_run(name: str, job: argparse.ArgumentParser) -> None:
    """The arguments of jobs that work in a run's folder."""
    if name in TOGETHER:
        add_processes(job)
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


def add_verify(job: argparse.ArgumentParser) -> None:
    job.add_argument(
        "--verify",
        choices=["fast", "full"],
        default="full",
        help="compare checkpoints with their SHA-256, or their sizes only (%(default)s)",
    )


def add_translate(job: argparse.ArgumentParser) -> None:
    job.add_argument("--to", required=True, help="target language, e.g. gl")
    job.add_argument("text", nargs="*", help="without text: standard input")


def add_atlas(job: argparse.ArgumentParser) -> None:
    job.add_argument("--model_dir", help="the folder of a model with experts")
    job.add_argument(
        "--split",
        choices=["train", "test"],
        default="train",
        help="who went where in training, or in the test sets and their translations",
    )


def add_watch(job: argparse.ArgumentParser) -> None:
    job.add_argument("--model_dir", help="the folder of the run")
    job.add_argument(
        "--seconds", type=float, default=10.0, help="between two looks (default: %(default)s)"
    )
    job.add_argument("--once", action="store_true", help="show it once")


def add_collectives(job: argparse.ArgumentParser) -> None:
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


def add_plan(job: argparse.ArgumentParser) -> None:
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


def add_common(job: argparse.ArgumentParser) -> None:
    """The arguments of every job that reads a config."""
    add_debug(job)
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


def add_processes(job: argparse.ArgumentParser) -> None:
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


def add_debug(job: argparse.ArgumentParser) -> None:
    job.add_argument("--debug", action="store_true", help="show where an error was raised")
