"""Shared code of the commands: common arguments, and the way to an experiment.

A command is a module m4.jobs.<command> with EXAMPLE, `add_arguments(parser)` and `run(arguments)`,
which returns the exit status or None, for 0. The command line imports only the chosen command.
Commands and this module import heavy libraries inside their functions, so that
`m4 COMMAND --help` answers at once.
"""

import argparse
import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m4.settings import InputError, SettingError, pasted

if TYPE_CHECKING:
    from m4.config import Config
    from m4.eval.metrics import Metric
    from m4.experiment import Experiment
    from m4.jobs.open_run import Run

# Arguments that may differ between the processes of a job, or that the compared config covers.
_OWN = ("do", "process_index", "processes", "debug", "verify", "gin_file", "gin_search_paths",
        "gin_bindings", "model_dir", "allow_module", "init_from", "keep_optimizer")  # fmt: skip

# Metrics without settings: each is a function named like its module in m4.eval.metrics.
METRICS = ("bleu", "chrf", "chrfpp", "ter", "exact_match")


class _Run(argparse.Action):
    """Stores the run's folder, given by the first argument or --model_dir, but not by both."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        if (given := namespace.model_dir) is not None:
            raise InputError(f"{values}: {given} is the run already; give one of them")
        namespace.model_dir = values


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Adds RUN, a positional form of --model_dir."""
    more: dict[str, Any] = {"nargs": "?", "action": _Run, "default": argparse.SUPPRESS}
    parser.add_argument("model_dir", metavar="RUN", help="run folder, like --model_dir", **more)


def add_config(
    parser: argparse.ArgumentParser, *, run: bool = True, processes: bool = False
) -> None:
    """Adds the arguments that name a config and, if asked, RUN and the processes of a job."""
    if run:
        _add_run(parser)
    group = parser.add_argument_group("configuration")
    many: dict[str, Any] = {"action": "append", "default": []}
    group.add_argument("--gin_file", **many, help="gin file of the config; may be repeated")
    text = "folders to search for gin files, separated by commas (default: .)"
    group.add_argument("--gin_search_paths", default=".", help=text)
    binding = "a binding, like --gin.NAME=VALUE; may be repeated"
    group.add_argument("--gin_bindings", **many, metavar="'NAME = VALUE'", help=binding)
    folder = "run folder (MODEL_DIR); without --gin_file, m4 uses the config saved there"
    group.add_argument("--model_dir", action=_Run, help=folder)
    text = "module outside m4 that the config saved in a run folder may import, and so run; "
    text += "FOLDER is where the module is (default: the working folder)"
    group.add_argument("--allow_module", **many, metavar="NAME[=FOLDER]", help=text)
    add_follow_links(group)
    if not processes:
        return
    # How one of several processes finds the others, under T5X's names.
    group = parser.add_argument_group("several processes", "one a host, all with the same command")
    text = "join the processes that the cluster (TPU, GKE, Slurm, Open MPI) names; TPU hosts "
    text += "do so by default where JAX_PLATFORMS begins with tpu"
    group.add_argument("--multiprocess", action="store_true", help=text)
    group.add_argument("--coordinator_address", metavar="HOST:PORT", help="host:port of process 0")
    for name, metavar, default, text in (
        ("process_count", "N", None, "number of processes"),
        ("process_index", "I", None, "index of this process, from 0"),
        ("heartbeat_seconds", "S", 30,
         "seconds without a heartbeat until a process counts as dead (default: 30)"),
        ("join_timeout_s", "S", None,
         "seconds to wait for all processes at start-up (default: 45; 300 with --multiprocess)"),
    ):  # fmt: skip
        group.add_argument(f"--{name}", type=int, metavar=metavar, default=default, help=text)


def add_follow_links(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds --follow_links, which `m4.cli.main` gives to `m4.storage.files`."""
    said = "follow links in run folders that lead out of them (default: refuse them)"
    parser.add_argument("--follow_links", action="store_true", help=said)


# Flags of several commands.
_FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dry_run": ("check all settings and shapes, print parameters and memory, and write nothing",
                {"action": "store_true"}),
    "verify": ("compare checkpoints and corpus with their SHA-256 (full), or their sizes only "
               "(fast) (default: full, for the corpus once per machine)",
               {"choices": ["fast", "full"]}),
    "split": ("sentences to use (default: test)", {"choices": ["test", "dev"]}),
    "step": ("a checkpoint that is kept; the results are in decodes/STEP (default: the latest)",
             {"type": int}),
    "testset": ("a test set of experiment.Experiment.testsets instead of the corpus's; NAME.gin is "
                "a file that binds it (gin_configs/testsets)", {"metavar": "NAME"}),
    # A command's own setting makes a trial: it is not written into the run's config.
    "beams": ("number of beams (default: the config's)", {"type": int, "metavar": "K"}),
    "sentences": ("sentences per direction (default: all)", {"type": int, "metavar": "N"}),
    "directions": ("use only these directions, such as en-gl,gl-en (default: all)", {}),
    "metrics": (f"metrics, separated by commas: {', '.join(METRICS)} (default: bleu,chrf)", {}),
}  # fmt: skip


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *names: str, **more: Any
) -> None:
    """Adds flags that several commands share; `more` overrides their argparse options."""
    for name in names:
        text, about = _FLAGS[name]
        parser.add_argument(f"--{name}", **{"help": text, **about, **more})


def split_of(arguments: argparse.Namespace, default: str = "test") -> str:
    """Returns the requested split or test set."""
    if arguments.testset is None:
        return arguments.split or default
    if arguments.split is not None:
        raise InputError(f"--split={arguments.split}: not with --testset={arguments.testset}")
    return Path(arguments.testset).name.removesuffix(".gin")


def metrics_of(arguments: argparse.Namespace) -> "list[Metric]":
    """Returns the metrics that --metrics names."""
    names = ("bleu,chrf" if arguments.metrics is None else arguments.metrics).split(",")
    if wrong := [name for name in names if name not in METRICS]:
        raise InputError(f"--metrics={wrong[0]}: must be of {', '.join(METRICS)}")
    return [getattr(importlib.import_module(f"m4.eval.metrics.{name}"), name) for name in names]


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """Adds RUN and --model_dir, for commands that read a run's folder and no config."""
    _add_run(parser)
    parser.add_argument("--model_dir", action=_Run, help="run folder")
    add_follow_links(parser)


def run_of(arguments: argparse.Namespace) -> str:
    """Returns the given run folder. Raises InputError without one."""
    if not arguments.model_dir:
        raise InputError("give a run folder: --model_dir=...")
    return arguments.model_dir


def portion_of(arguments: argparse.Namespace) -> tuple[int | None, tuple[str, ...]]:
    """Returns --sentences (per direction) and --directions; None and () mean all."""
    if arguments.sentences is not None and arguments.sentences < 1:
        raise InputError(f"--sentences={arguments.sentences}: must be 1 or more")
    return arguments.sentences, tuple(filter(None, (arguments.directions or "").split(",")))


def steps_of(text: str) -> list[int]:
    """Parses steps, "1000,2000" -> [1000, 2000]. Raises InputError for any other text."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise InputError(f"--steps={text}: must be steps with commas between them, as 1000,2000")
    return sorted({int(step) for step in text.split(",")})


def read_config(
    arguments: argparse.Namespace, more: Sequence[str] = (), model_dir: str | None = None
) -> "Config":
    """Reads the config of --gin_file, or the one saved in --model_dir, and the bindings."""
    from m4 import config
    from m4.storage.local_copy import fetched

    folders = arguments.gin_search_paths.split(",")
    files = list(arguments.gin_file)
    for name in files:
        if config.find_file(name, folders) is None:
            said = f"--gin_file={name}: no such file in {', '.join(folders)} (--gin_search_paths)"
            raise InputError(said)
    allowed = None  # a gin file named by the user may import the user's code
    if not files:
        if not arguments.model_dir:
            raise InputError("give a config: --gin_file=gin_configs/demo.gin, or a run folder")
        saved = fetched(arguments.model_dir) / "config.gin"
        if not saved.is_file():
            hint = "train first"
            if str(arguments.model_dir).endswith(".gin"):
                hint = f"a config is given as --gin_file={arguments.model_dir}"
            raise InputError(f"--model_dir={arguments.model_dir}: no config.gin there; {hint}")
        files, allowed = [str(saved)], arguments.allow_module
    testset = getattr(arguments, "testset", None) or ""
    if testset.endswith(".gin"):
        if config.find_file(testset, folders) is None:
            raise InputError(f"--testset={testset}: no such file in {', '.join(folders)}")
        files.append(testset)
    given = [*arguments.gin_bindings, *more]
    for name in ("beams", "n_best"):
        if (value := getattr(arguments, name, None)) is not None:
            given.append(f"experiment.Decoding.{name} = {value}")
    if getattr(arguments, "init_from", None):
        given.append(f"INITIAL_CHECKPOINT_PATH = {arguments.init_from!r}")
        if arguments.allow_module:
            given.append(f"initial.InitialModel.allow_modules = {arguments.allow_module!r}")
    if getattr(arguments, "keep_optimizer", False):
        given.append("initial.InitialModel.optimizer = True")
    folder = model_dir or arguments.model_dir
    return config.load(files, given, model_dir=folder, folders=folders, allowed_modules=allowed)


@contextmanager
def experiment_of(arguments: argparse.Namespace) -> Iterator[tuple["Experiment", "Config"]]:
    """Yields the experiment and its config; joins other processes, and explains SettingErrors."""
    config = read_config(arguments)
    from m4.storage import checksums

    checksums.choose(getattr(arguments, "verify", None))
    try:
        experiment = config.experiment()
        if getattr(arguments, "processes", None) and not getattr(arguments, "dry_run", False):
            from m4.parallel import distributed

            distributed.join(arguments.processes)
            said = {k: str(value) for k, value in vars(arguments).items() if k not in _OWN}
            distributed.check_agreement({**config.settings, **said})
        yield experiment, config
    except SettingError as error:
        raise InputError(config.explain(error)) from error


def dry_run(arguments: argparse.Namespace) -> bool:
    """Carries out --dry_run if it was given, and returns whether it was."""
    if arguments.dry_run:
        from m4.jobs import dry_run

        dry_run.dry_run(arguments)
    return arguments.dry_run


@contextmanager
def opened(
    arguments: argparse.Namespace, *writes: str, fresh: bool = False, computes: bool = True
) -> Iterator["Run"]:
    """Opens the run of the arguments (`m4.jobs.open_run.open_run`)."""
    with experiment_of(arguments) as (experiment, config):
        from m4.jobs.open_run import open_run

        with open_run(experiment, config, *writes, fresh=fresh, computes=computes) as run:
            yield run


def print_next(run: "Run", command: str) -> None:
    """Prints the run's folder and the next command."""
    from m4.jobs.decoding.testsets import trial_flags
    from m4.parallel import distributed

    if distributed.is_primary():
        own = [f"--allow_module={name}={at}" for name, at in run.modules.items()]
        own += trial_flags(run.experiment)
        said = pasted(*command.split(), f"--model_dir={run.address}", *own)
        print(f"{run.address}; next: {said}")
