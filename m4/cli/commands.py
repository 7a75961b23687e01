"""What each command does with its arguments: reads the config, claims the folder, calls the job."""

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from m4.cli import environment, reading
from m4.cli.data_arguments import DATA_JOBS
from m4.cli.decode_arguments import audit_portion, text_request
from m4.cli.job_arguments import PRINTED, SHARED, follow_options, steps_of
from m4.cli.report_arguments import comparison
from m4.parallel.distributed_options import DistributedOptions
from m4.settings import InputError

if TYPE_CHECKING:
    from m4.config import Config
    from m4.experiment import Experiment


def run(
    parsed: argparse.Namespace, bindings: Sequence[str], options: DistributedOptions | None = None
) -> int:
    """Runs the job, after joining other processes where there are any; returns the exit status."""
    if parsed.job in PRINTED and "stdout" in environment.closed:
        raise InputError("standard output is closed: what the job prints would be lost")
    if parsed.job in ("atlas", "checkpoint", "export", "new", "watch"):
        return _show(parsed, bindings)
    if parsed.job == "collectives":
        return _collectives(parsed, bindings)
    if parsed.job == "plan" and parsed.facts is None:
        from m4.jobs.plan import plan

        return plan(parsed, bindings)
    if parsed.job == "report" and (several := comparison(parsed, bindings, options is not None)):
        from m4.jobs.decoding.compare import compare

        compare(**several)
        return 0
    if parsed.job == "average":
        parsed.model_dir = parsed.run or parsed.model_dir
    config = read_config(parsed, bindings)
    from m4.settings import SettingError
    from m4.storage import checksums

    checksums.choose(getattr(parsed, "verify", None))
    try:
        experiment = config.experiment()
        if options is not None and not getattr(parsed, "dry_run", False):
            _join(config, parsed, options)
        return _with_config(parsed, bindings, options, experiment, config)
    except SettingError as error:
        raise InputError(config.explain(error)) from error


def _join(config: "Config", parsed: argparse.Namespace, options: DistributedOptions) -> None:
    """Joins the other processes; InputError: one has another config, or other arguments."""
    from m4.parallel import distributed
    from m4.parallel.consistency_check import check_agreement

    distributed.join(options)
    asked = ("job", "compare", "fresh", "new_chapter", "split", "step", "watch", "steps",
             "sentences", "directions", "seconds", "input", "to", "output",
             "json", "audit")  # fmt: skip
    said = {name: str(getattr(parsed, name, None)) for name in asked}
    check_agreement({**config.settings, **said})


def _with_config(
    parsed: argparse.Namespace,
    bindings: Sequence[str],
    options: DistributedOptions | None,
    experiment: "Experiment",
    config: "Config",
) -> int:
    """The jobs that a config decides."""
    if getattr(parsed, "dry_run", False):
        from m4.jobs.dry_run import dry_run

        dense = getattr(parsed, "compare", None) == "dense"
        return dry_run(experiment, parsed.job, dense=dense, alone=options is None)
    if parsed.job == "data":
        return _data(experiment, config, parsed)
    if parsed.job == "plan":
        from m4.jobs.plan import write_facts

        write_facts(experiment, parsed)
        return 0
    if parsed.job == "average":
        return _average(experiment, parsed, bindings)
    if parsed.job == "score" and any((parsed.source, parsed.target, parsed.to)):
        return reading.score_files(experiment, config, parsed)
    if parsed.job == "translate":
        return reading.translate(experiment, config, parsed)
    if parsed.job == "decode" and (portion := audit_portion(parsed)) is not None:
        return reading.audit(experiment, config, parsed.step, portion)
    if parsed.job == "decode" and (request := text_request(parsed)) is not None:
        return reading.decode_text(experiment, config, parsed.step, request)
    return _job(experiment, config, parsed)


def read_config(
    parsed: argparse.Namespace, bindings: Sequence[str], model_dir: str | None = None
) -> "Config":
    """The config of --gin_file, else the saved one of --model_dir, and the bindings.

    model_dir: MODEL_DIR, where it is not --model_dir.

    Raises:
        InputError: there is neither. m4.config.ConfigError: a mistake in them.
    """
    from m4 import config

    folders = parsed.gin_search_paths.split(",")
    files = list(parsed.gin_file)
    for name in files:
        if config.find_file(name, folders) is None:
            raise InputError(
                f"--gin_file={name}: no such file in {', '.join(folders)} (--gin_search_paths)"
            )
    allowed = None  # a gin file that the user names is the user's own code
    if not files:
        if not parsed.model_dir:
            raise InputError("give a config: --gin_file=gin_configs/demo.gin, or --model_dir=...")
        saved = reading.local_folder(parsed.model_dir) / "config.gin"
        if not saved.is_file():
            raise InputError(f"--model_dir={parsed.model_dir}: no config.gin there; train first")
        files, allowed = [str(saved)], parsed.allow_module
    given = [*parsed.gin_bindings, *bindings]
    if getattr(parsed, "init_from", None):
        given.append(f"INITIAL_CHECKPOINT_PATH = {parsed.init_from!r}")
        if parsed.allow_module:
            given.append(f"initial.InitialModel.allow_modules = {parsed.allow_module!r}")
    folder = model_dir or parsed.model_dir
    return config.load(files, given, model_dir=folder, folders=folders, allowed_modules=allowed)


def _job(experiment: "Experiment", config: "Config", parsed: argparse.Namespace) -> int:
    """The jobs that write into MODEL_DIR: one at a time, and for one config."""
    from m4.jobs import baselines, decode, demo, evaluate, report, train
    from m4.jobs.claim import claimed_together
    from m4.jobs.decoding import score
    from m4.jobs.watching import follow
    from m4.parallel import distributed
    from m4.parallel.platform.accelerator import check_accelerator
    from m4.storage import remote

    dense, fresh = parsed.compare == "dense", getattr(parsed, "fresh", False)
    split, step = getattr(parsed, "split", None) or "test", getattr(parsed, "step", None)
    followed = follow_options(parsed)
    check_accelerator()
    experiment.training.mesh()  # one that is not possible is refused before the folder is claimed
    distributed.check_joined()
    if parsed.job == "demo" and distributed.is_distributed():
        raise InputError("one process does all of the demo; several can share `m4 train`")
    do = {
        "train": lambda: train.train(experiment, dense=dense),
        "baselines": lambda: baselines.baselines(experiment),
        "decode": lambda: decode.decode(
            experiment, dense=dense, split=split, step=step, t5x=parsed.format == "t5x"
        ),
        "eval": lambda: evaluate.evaluate(experiment, dense=dense, split=split, step=step),
        "score": lambda: score.score(experiment, dense=dense, split=split, step=step),
        "report": lambda: report.report(experiment, dense=dense),
        "demo": lambda: demo.demo(experiment, dense=dense),
    }[parsed.job]
    if followed is not None:
        do = functools.partial(follow.follow, experiment, **followed)
    kinds = {"train": ["train"], "baselines": ["baselines"], "demo": ["train", "eval", "baselines"]}
    by_step = step is not None or followed is not None
    written = kinds.get(parsed.job, ["steps" if by_step else "eval"])
    chapter = getattr(parsed, "new_chapter", None)
    if chapter is not None and fresh:
        raise InputError("--new_chapter and --fresh: a run that starts over has one chapter")
    with claimed_together(experiment, config, *written, fresh=fresh, new_chapter=chapter) as folder:
        if parsed.job in SHARED:
            do()
        else:
            distributed.on_primary_then_broadcast(parsed.job, lambda: (do(), None)[1])
    if distributed.is_primary() and (after := _NEXT.get(parsed.job)):
        own = "".join(f" --allow_module={name}={at}" for name, at in config.modules.items())
        print(f"{remote.shown(folder)}; next: m4 {after} --model_dir={experiment.model_dir}{own}")
    return 0


_NEXT = {"train": "eval", "baselines": "report", "decode": "eval"}


def _data(experiment: "Experiment", config: "Config", parsed: argparse.Namespace) -> int:
    """`m4 data <look>`: no mesh is made, so that no accelerator is touched."""
    import contextlib
    import importlib

    from m4.jobs.claim import claimed

    options = {name: getattr(parsed, name) for name in DATA_JOBS[parsed.look].options}
    look = getattr(importlib.import_module(f"m4.jobs.data.{parsed.look}"), parsed.look)
    shared = parsed.look == "prepare" and experiment.data.data_dir is not None
    with contextlib.nullcontext() if shared else claimed(experiment, config, "data"):
        look(experiment, **options)
    return 0


def _average(experiment: "Experiment", parsed: argparse.Namespace, bindings: Sequence[str]) -> int:
    """`m4 average`: the run is read, and the mean's own folder is written, as training writes."""
    from m4.jobs.checkpoints import average
    from m4.jobs.claim import claimed_together
    from m4.parallel.platform.accelerator import check_accelerator
    from m4.storage import run_folder

    run_folder.read(reading.local_folder(experiment.model_dir))
    if parsed.last is not None and parsed.last < 2:
        raise InputError(f"--last={parsed.last}: must be 2 or more")
    asked = None if parsed.steps is None else steps_of(parsed.steps)
    steps = average.chosen_steps(experiment, parsed.last, asked)
    place = parsed.output or average.output_of(experiment, steps)
    made = read_config(parsed, [*bindings, *average.bindings(experiment)], place)
    check_accelerator()
    output = made.experiment()
    with claimed_together(output, made, "train"):
        average.average(experiment, output, steps)
    print(f"{place}: the mean of steps {', '.join(map(str, steps))}; "
          f"next: m4 eval --model_dir={place}")  # fmt: skip
    return 0


def _show(parsed: argparse.Namespace, bindings: Sequence[str]) -> int:
    """`m4 atlas`, `checkpoint`, `export`, `new` and `watch`: without a config."""
    if bindings:
        raise InputError(f"'{bindings[0]}': {parsed.job} reads no config, only a folder")
    if parsed.job == "new":
        from m4.jobs.new.new import new

        new(parsed.folder, parsed.out, parsed.yes)
        return 0
    folder = getattr(parsed, "run", None) or parsed.model_dir
    if not folder:
        raise InputError("give a run folder: --model_dir=...")
    if parsed.job == "checkpoint":
        from m4.jobs.checkpoints.checkpoint import checkpoint
        from m4.jobs.prepare import console

        more = {name: getattr(parsed, name) for name in ("dtype", "weights", "output")}
        return 0 if checkpoint(parsed.what, folder, parsed.step, console(), **more) else 1
    if parsed.job == "export":
        from m4.jobs.checkpoints.export import export

        print(export(folder, parsed.step, parsed.output))
        return 0
    if parsed.job == "watch":
        from m4.jobs.watching.watch import watch

        watch(folder, parsed.seconds, once=parsed.once)
        return 0
    from m4.eval.report import atlas
    from m4.jobs.prepare import console

    atlas.show(reading.local_folder(folder), parsed.split, console(), parsed.output)
    return 0


def _collectives(parsed: argparse.Namespace, bindings: Sequence[str]) -> int:
    """`m4 collectives`: of operators, or of a config's training step; on fake CPU devices."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200)
    of_config = bool(parsed.gin_file or parsed.model_dir or parsed.gin_bindings or bindings)
    devices = parsed.devices or ("8" if of_config else "2,4,8,16,32,64")
    if not re.fullmatch(r"\d+" if of_config else r"\d+(,\d+)*", devices):
        one = "one number, as 8" if of_config else "numbers with commas between them, as 2,8,64"
        raise InputError(f"--devices={devices}: {one}")
    if of_config:
        from m4.parallel.platform.jax_setup import use_fake_devices

        use_fake_devices(int(devices))
        config = read_config(parsed, bindings)
        from m4.plan import local_program
        from m4.settings import SettingError

        try:
            local_program.show(config.experiment(), parsed.languages, parsed.output, console)
        except SettingError as error:
            raise InputError(config.explain(error)) from error
        return 0
    from m4.plan.hlo import table4

    rows = table4.table([int(count) for count in devices.split(",")])
    table4.show(rows, console)
    if parsed.output:
        table4.save(rows, parsed.output)
        print(f"wrote {parsed.output}")
    return 0
