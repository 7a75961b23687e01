"""The arguments of each job."""

import argparse
import re
from pathlib import Path
from typing import Any

from m4.cli.report_arguments import add_comparison
from m4.settings import InputError

# The jobs that several processes can be started with, and those whose work they share; the others
# are the primary's.
TOGETHER = ("train", "baselines", "decode", "eval", "score", "report", "demo")
SHARED = ("train", "decode", "eval", "score")
# The jobs whose result is what they print; what others print is in files as well.
PRINTED = ("atlas", "checkpoint", "collectives", "plan", "watch")


def add_run(name: str, job: argparse.ArgumentParser) -> None:
    """The arguments of jobs that work in a run's folder."""
    if name in TOGETHER:
        add_processes(job)
    if name in ("train", "demo"):
        job.add_argument(
            "--fresh",
            action="store_true",
            help="remove what m4 wrote there; start over",
        )
        job.add_argument(
            "--init_from",
            metavar="RUN[@STEP]",
            help="begin from the model of another run's folder, or a checkpoint of T5X "
            "(INITIAL_CHECKPOINT_PATH)",
        )
    if name == "train":
        job.add_argument(
            "--new_chapter",
            nargs="?",
            const="",
            metavar="REASON",
            help="train on from the last checkpoint with settings that may change from now on",
        )
    if name in ("decode", "eval", "score"):
        default = "(test; with --watch dev)" if name == "eval" else "(test)"
        job.add_argument("--split", choices=["test", "dev"], help=default)
        job.add_argument(
            "--step",
            type=int,
            help="a checkpoint that is kept; results in decodes/STEP (the latest)",
        )
    if name == "score":
        add_given(job)
    if name == "eval":
        add_follow(job)
    if name == "report":
        add_comparison(job)
    job.add_argument("--compare", choices=["dense"], help="also train a dense model for comparison")
    if name != "report":
        add_dry_run(job)


def add_dry_run(job: argparse.ArgumentParser) -> None:
    job.add_argument(
        "--dry_run",
        action="store_true",
        help="check every setting and all shapes, print parameters and memory, write nothing",
    )


def add_given(job: argparse.ArgumentParser) -> None:
    """What is scored, where it is not a test set."""
    group = job.add_argument_group("files", "pairs of lines, in the place of the run's test set")
    group.add_argument("--source", type=Path, metavar="FILE", help="of sources, a line each")
    group.add_argument("--target", type=Path, metavar="FILE", help="their translations")
    group.add_argument("--to", help="target language, e.g. gl")


def add_checkpoint(job: argparse.ArgumentParser) -> None:
    job.add_argument(
        "what",
        choices=["list", "verify", "inspect", "convert"],
        help="list: steps; verify: their SHA-256; inspect: arrays, norms, values that are not "
        "finite; convert: the parameters as a file or a separate run",
    )
    job.add_argument("run", nargs="?", help="the folder of the run, as --model_dir")
    job.add_argument("--model_dir", help="the folder of the run")
    job.add_argument("--step", type=int, help="(all; to inspect and convert the last whole one)")
    job.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="of convert")
    job.add_argument(
        "--output",
        type=Path,
        help="of convert: FILE.safetensors, or a folder: a run that translates",
    )
    job.add_argument(
        "--weights",
        type=Path,
        metavar="FILE.safetensors",
        help="of convert: take these arrays instead of the run's",
    )


def add_export(job: argparse.ArgumentParser) -> None:
    job.add_argument("run", nargs="?", help="the folder of the run, as --model_dir")
    job.add_argument("--model_dir", help="the folder of the run")
    job.add_argument("--format", choices=["t5x"], required=True, help="whose checkpoint it becomes")
    job.add_argument("--output", type=Path, required=True, help="a new folder, a MODEL_DIR of T5X")
    job.add_argument("--step", type=int, help="a checkpoint that is kept (the last whole one)")


def add_verify(job: argparse.ArgumentParser) -> None:
    job.add_argument(
        "--verify",
        choices=["fast", "full"],
        help="compare checkpoints and the corpus with their SHA-256, or sizes only (full, of the "
        "corpus once a machine)",
    )


def add_follow(job: argparse.ArgumentParser) -> None:
    """How checkpoints are scored one after the other."""
    group = job.add_argument_group("checkpoint by checkpoint", "scores_by_step.jsonl, and its plot")
    group.add_argument(
        "--watch", action="store_true", help="score new checkpoints too, until training has ended"
    )
    group.add_argument("--steps", help="score these, 1000,2000, or all that there are: all")
    group.add_argument("--sentences", type=int, help="so many of each direction (all)")
    group.add_argument("--directions", help="of these alone, en-gl,gl-en (all)")
    group.add_argument("--seconds", type=float, help="between two looks with --watch (30)")


def follow_options(parsed: argparse.Namespace) -> dict[str, Any] | None:
    """The arguments of `m4.jobs.watching.follow.follow`, and the split, sentences and directions of
    its portion; None: one checkpoint is scored as ever.

    Raises:
        InputError: arguments that cannot be, or not together.
    """
    if not (getattr(parsed, "watch", False) or getattr(parsed, "steps", None)):
        for name in ("sentences", "directions", "seconds"):
            if getattr(parsed, name, None) is not None:
                raise InputError(f"--{name}: give --watch or --steps, too")
        return None
    for name, value in (("--step", parsed.step), ("--compare", parsed.compare)):
        if value is not None:
            raise InputError(f"{name}={value}: not with --watch or --steps")
    if parsed.watch and parsed.steps:
        raise InputError(f"--steps={parsed.steps}: --watch scores all; give one of them")
    steps, seconds = None, None
    if parsed.watch:
        seconds = 30.0 if parsed.seconds is None else parsed.seconds
        if not 0 < seconds < 1e6:
            raise InputError(f"--seconds={seconds}: must be above 0")
    elif parsed.seconds is not None:
        raise InputError(f"--seconds={parsed.seconds}: only with --watch")
    elif parsed.steps != "all":
        steps = steps_of(parsed.steps)
    if parsed.sentences is not None and parsed.sentences < 1:
        raise InputError(f"--sentences={parsed.sentences}: must be 1 or more")
    return {
        "split": parsed.split or ("dev" if parsed.watch else "test"),
        "sentences": parsed.sentences,
        "directions": tuple(filter(None, (parsed.directions or "").split(","))),
        "steps": steps,
        "seconds": seconds,
    }


def steps_of(text: str) -> list[int]:
    """ "1000,2000" -> [1000, 2000]. InputError: no such list."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise InputError(f"--steps={text}: must be steps with commas between them, as 1000,2000")
    return sorted({int(step) for step in text.split(",")})


def add_average(job: argparse.ArgumentParser) -> None:
    job.add_argument("run", nargs="?", metavar="RUN", help="the run's folder, as --model_dir")
    group = job.add_mutually_exclusive_group(required=True)
    group.add_argument("--last", type=int, metavar="N", help="the last N checkpoints")
    group.add_argument("--steps", help="these checkpoints, as 1000,2000")
    job.add_argument(
        "--output", help="the new run's folder (RUN-average<how many>-<the last step>)"
    )


def add_translate(job: argparse.ArgumentParser) -> None:
    job.add_argument("--to", required=True, help="target language, e.g. gl")
    job.add_argument("text", nargs="*", help="without text: standard input")
    job.add_argument(
        "--json",
        action="store_true",
        help="a line of JSON for each: source, all translations (Decoding.n_best), scores",
    )
    add_dry_run(job)


def add_atlas(job: argparse.ArgumentParser) -> None:
    job.add_argument("--model_dir", help="the folder of a model with experts")
    job.add_argument(
        "--split",
        choices=["train", "test"],
        default="train",
        help="who went where in training, or in the test sets and their translations",
    )
    job.add_argument("--output", type=Path, metavar="FILE.png", help="(RUN/atlas.png)")


def add_new(job: argparse.ArgumentParser) -> None:
    job.add_argument("folder", help="of sentence pairs of English and other languages")
    job.add_argument("--out", metavar="FILE", help="the gin file (<name of the folder>.gin)")
    job.add_argument("--yes", action="store_true", help="take the defaults, ask nothing")


def add_watch(job: argparse.ArgumentParser) -> None:
    job.add_argument("run", nargs="?", help="the folder of the run, as --model_dir")
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
