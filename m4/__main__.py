"""The command line, and the only importer of gin: `m4 train|decode|eval|report|atlas|...`."""

import argparse
import contextlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from m4.arguments import DATA_JOBS, SHARED, distributed_options_of, gin_arguments, parser
from m4.arguments import JOBS as JOBS
from m4.mistakes import UserError, check_values, is_ours, missing_argument, near, one_line
from m4.parallel.distributed_options import DistributedOptions
from m4.parallel.huge_pages import restart_with_huge_pages
from m4.parallel.supervise import PEER_LOST_STATUS, supervise
from m4.storage.lease import LeaseLost, UploadFailed

if TYPE_CHECKING:
    from m4.experiment import Setup


def parse_config(arguments: argparse.Namespace, bindings: Sequence[str]) -> dict[str, str]:
    """Reads the gin files and bindings; returns all bindings as text. UserError names the place."""
    import gin

    folders = arguments.gin_search_paths.split(",")
    files = config_files(arguments, folders)
    bindings = [*arguments.gin_bindings, *bindings]
    if arguments.model_dir:
        bindings.append(f"MODEL_DIR = {str(arguments.model_dir)!r}")
    for path in folders:
        gin.add_config_file_search_path(path)
    for name in files:
        _parsed(lambda name=name: gin.parse_config_file(name), "")
    # What the files import can be named on the command line, also where it is not bound yet.
    imports = re.findall(r"^(?:from|import) .*$", gin.config_str(), re.MULTILINE)
    for binding in bindings:
        text = "\n".join([*imports, binding])
        _parsed(lambda text=text: gin.parse_config(text), f"'{binding}': ")
    values = _values()
    if _DECODING not in values and any(name.startswith("jobs.Decoding.") for name in values):
        # Else a config that leaves decoding at its defaults would not hear of them.
        gin.parse_config("\n".join([*imports, f"{_DECODING} = @jobs.Decoding()"]))
        values = _values()
    check_values(values, [path for name in files for path in _found(name, folders)[:1]])
    return values


_DECODING = "jobs.Setup.decoding"


def _values() -> dict[str, str]:
    """All bindings of the config as text."""
    import gin

    text = gin.config_str(max_line_length=1_000_000)
    return dict(re.findall(r"^([\w./]+) = (.*)$", text, re.MULTILINE))


def model_folder(model_dir: str) -> Path:
    """Where a model's files are to be read: of one in an object store the working copy."""
    from m4.storage import remote

    folder = remote.local(model_dir)
    remote.fetch(folder)
    return folder


def config_files(arguments: argparse.Namespace, folders: Sequence[str]) -> list[str]:
    """The files of --gin_file, or the one in --model_dir. UserError: there is none."""
    files = list(arguments.gin_file)
    if not files and arguments.model_dir:
        files = [str(model_folder(arguments.model_dir) / "config.gin")]
        if not Path(files[0]).is_file():
            raise UserError(f"--model_dir={arguments.model_dir}: no config.gin there; train first")
    if not files:
        raise UserError("give a config: --gin_file=gin_configs/demo.gin, or --model_dir=...")
    for name in files:
        if not _found(name, folders):
            raise UserError(
                f"--gin_file={name}: no such file in {', '.join(folders)} (--gin_search_paths)"
            )
    return files


def _found(name: str, folders: Sequence[str]) -> list[Path]:
    paths = [Path(folder) / name for folder in ("", *folders)]
    return [path for path in paths if path.is_file()]


def _parsed(parse: Callable[[], object], place: str) -> None:
    """Has gin parse something; its errors become one line: place, mistake, what was meant."""
    import gin

    try:
        parse()
    except (ValueError, SyntaxError, OSError, ImportError, AttributeError, NameError) as error:
        # gin puts the place behind the message: `In file "x.gin", line 3`.
        known = gin_imports(gin.config_str())
        if found := re.search(r'In file "(.+?)", line (\d+)', str(error)):
            place = f"{found[1]} line {found[2]}: "
            known = gin_imports(Path(found[1]).read_text(encoding="utf-8"))
        elif isinstance(error, SyntaxError) and not place:
            place = f"{error.filename} line {error.lineno}: "
        raise UserError(f"config: {place}{_mistake(error, known)}") from error


def gin_imports(text: str) -> set[str]:
    """What a config can name: its imports, and everything that is bound already."""
    import gin

    bound = re.findall(r"^([\w.]+)\.\w+ =", gin.config_str(), re.MULTILINE)
    return {*re.findall(r"^(?:from [\w.]+ )?import (?:.+ as )?(\w+)", text, re.MULTILINE), *bound}


def _mistake(error: Exception, known: Iterable[str]) -> str:
    """gin's message in one line, with the nearest name that there is."""
    import gin

    text = error.msg if isinstance(error, SyntaxError) else one_line(error)
    if "malformed node" in text:  # the words of Python's parser of literals
        return "the value cannot be read; text needs quotes of its own"
    if isinstance(error, SyntaxError):
        return f"cannot be read: {text}"
    if found := re.match(r"Configurable '(.+)' doesn't have a parameter named '(.+)'", text):
        configurable = gin.get_configurable(found[1])
        if isinstance(configurable, type):
            configurable = configurable.__init__
        parameters = inspect.signature(configurable).parameters
        return f"{found[1]} has no parameter {found[2]}{near(found[2], parameters)}"
    if found := re.match(r"Couldn't resolve selector .+; <module '(.+?)' .+ attribute (\w+)", text):
        return f"{found[1]} has no {found[2]}{near(found[2], vars(sys.modules[found[1]]))}"
    if found := re.match(r"(?:No configurable matching )?'([\w.]+)'(?: was not|\.)", text):
        return f"the config imports nothing called {found[1]}{near(found[1], known)}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one job; returns the exit status.

    0; 1 where another process of the job was lost, or the last files did not get to MODEL_DIR's
    store; 2 for a mistake of the user's; 3 where another job has taken MODEL_DIR over; 130 for
    Ctrl-C.
    """
    others, bindings = gin_arguments(sys.argv[1:] if arguments is None else arguments)
    parsed = parser().parse_args(others)
    try:
        options = distributed_options_of(parsed, os.environ)
    except ValueError as error:
        print(f"m4 {_name(parsed)}: {one_line(error)}", file=sys.stderr)
        return 2
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if arguments is None:  # the program itself, not a call from another one
        restart_with_huge_pages()
        if options is not None:
            status = supervise(f"m4 {_name(parsed)}")
            return together(parsed, bindings, options) if status is None else status
    status = alone(parsed, bindings)
    if arguments is None and status == LeaseLost.status:
        sys.stdout.flush()
        os._exit(status)  # the interpreter's own end would wait for a checkpoint being written
    return status


def together(
    parsed: argparse.Namespace, bindings: Sequence[str], options: DistributedOptions
) -> int:
    """Runs one job as one of several processes; ends the process where it fails."""
    from m4.parallel import distributed

    status = PEER_LOST_STATUS
    try:
        status = alone(parsed, bindings, options)
        if status == 0:
            distributed.shutdown()
    except distributed.PEER_LOST_ERRORS as error:
        status = PEER_LOST_STATUS
        said = distributed.peer_lost(error)
        if said is None:
            raise
        print(f"m4 {_name(parsed)}: {said}", file=sys.stderr)
    finally:
        if status != 0:
            if sys.exception() is not None:
                traceback.print_exc()
            # The interpreter's own end would wait for the others.
            distributed.abort_process(status)
    return status


def alone(
    parsed: argparse.Namespace, bindings: Sequence[str], options: DistributedOptions | None = None
) -> int:
    """Runs one job; returns the exit status. Errors that are nobody's mistake are raised."""
    try:
        status = run(parsed, bindings, options)
    except (UserError, ValueError) as error:
        if parsed.debug or not is_ours(error):
            raise
        print(f"m4 {_name(parsed)}: {one_line(error)}", file=sys.stderr)
        return 2
    except (LeaseLost, UploadFailed) as error:
        print(f"m4 {_name(parsed)}: {one_line(error)}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt as error:
        said = one_line(error) if str(error) else "interrupted; the same command goes on"
        print(f"m4 {_name(parsed)}: {said}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0  # `m4 translate | head`
    return status


def _mutable(config: Mapping[str, str]) -> list[str]:
    """The settings that may change between two runs in one folder."""
    # A scope ("low/baselines.Recipe.width") belongs to what it scopes.
    return [name for name in config if name.split("/")[-1].startswith(_MUTABLE)]


_MUTABLE = (
    *("MODEL_DIR", "TRAIN_STEPS", "cache.prepare.rebuild", "jobs.Decoding.", "baselines."),
    *("jobs.Setup.about", "jobs.Setup.baselines", "jobs.Setup.decoding", "jobs.Setup.dev_"),
    *("jobs.Setup.high", "jobs.Setup.low", "jobs.Setup.model_dir", "jobs.Setup.total_steps"),
    *("loop.train.checkpoint_period", "loop.train.keep", "loop.train.log_period"),
    *("loop.train.rules", "loop.train.tensorboard", "loop.train.zero", "report.", "mesh."),
)


def _name(parsed: argparse.Namespace) -> str:
    return " ".join([parsed.job, *([parsed.look] if parsed.job == "data" else [])])


def run(
    parsed: argparse.Namespace, bindings: Sequence[str], options: DistributedOptions | None = None
) -> int:
    """Configures and runs the job, after joining other processes where there are any."""
    if parsed.job == "atlas":
        draw_atlas(parsed.model_dir, parsed.split, bindings)
        return 0
    if parsed.job == "collectives":
        show_collectives(parsed, bindings)
        return 0
    if parsed.job == "plan" and parsed.facts is None:
        from m4.plan.job import plan

        return plan(parsed, bindings)
    config = parse_config(parsed, bindings)
    if options is not None:
        from m4.parallel import distributed
        from m4.parallel.consistency_check import check_agreement

        distributed.join(options)
        asked = {name: str(getattr(parsed, name, None)) for name in ("job", "compare", "fresh")}
        check_agreement({**config, **asked})
    try:
        work(parsed, config)
    except TypeError as error:
        if said := missing_argument(error, config):
            raise UserError(said) from error
        raise
    return 0


def draw_atlas(model_dir: str | None, split: str, bindings: Sequence[str]) -> None:
    """`m4 atlas`: without a config, so without gin, and without JAX."""
    from rich.console import Console

    from m4.eval.report import atlas

    if not model_dir:
        raise UserError("give a model's folder: --model_dir=...")
    if bindings:
        raise UserError(f"'{bindings[0]}': atlas reads no config, only --model_dir")
    width = None if sys.stdout.isatty() else 120
    atlas.show(model_folder(model_dir), split, Console(width=width))


def show_collectives(parsed: argparse.Namespace, bindings: Sequence[str]) -> None:
    """`m4 collectives`: of operators, or of a config's training step; on fake CPU devices."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200)
    of_config = bool(parsed.gin_file or parsed.model_dir or parsed.gin_bindings or bindings)
    devices = parsed.devices or ("8" if of_config else "2,4,8,16,32,64")
    if not re.fullmatch(r"\d+" if of_config else r"\d+(,\d+)*", devices):
        one = "one number, as 8" if of_config else "numbers with commas between them, as 2,8,64"
        raise UserError(f"--devices={devices}: {one}")
    if of_config:
        from m4.parallel.jax_setup import use_fake_devices

        use_fake_devices(int(devices))
        parse_config(parsed, bindings)
        import gin

        from m4 import jobs
        from m4.plan import local_program

        local_program.show(
            gin.get_configurable(jobs.Setup)(), parsed.languages, parsed.output, console
        )
        return
    from m4.plan.hlo import table4

    rows = table4.table([int(count) for count in devices.split(",")])
    table4.show(rows, console)
    if parsed.output:
        table4.save(rows, parsed.output)
        print(f"wrote {parsed.output}")


def work(parsed: argparse.Namespace, config: Mapping[str, str]) -> None:
    """Runs the job that gin is configured for."""
    import gin

    from m4 import jobs
    from m4.parallel import distributed
    from m4.storage import run_folder

    setup = gin.get_configurable(jobs.Setup)()
    if parsed.job == "data":
        look(setup, parsed, config)
        return
    if parsed.job == "plan":
        from m4.plan.job import write_facts

        write_facts(setup, parsed)
        return
    if parsed.job == "translate":
        run_folder.check(model_folder(setup.model_dir), config, _mutable(config))
        jobs.prepare_process(setup)
        translator = jobs.translator(setup)
        if parsed.text:
            for line in translator.translate(parsed.text, parsed.to):
                print(line, flush=True)
        else:
            translator.stream(sys.stdin.fileno(), parsed.to, sys.stdout)
        return
    dense = parsed.compare == "dense"
    setup.mesh()  # one that is not possible is told before the folder is claimed
    distributed.check_joined()
    if parsed.job == "demo" and distributed.is_distributed():
        raise UserError("one process does all of the demo; several can share `m4 train`")
    with contextlib.ExitStack() as stack:

        def claim() -> str:
            stack.enter_context(run_folder.locked(setup.folder))
            text = gin.config_str()
            fresh = getattr(parsed, "fresh", False)
            run_folder.claim(setup.folder, config, text, mutable=_mutable(config), fresh=fresh)
            return run_folder.digest(setup.folder)

        run_folder.check_shared(
            setup.folder, distributed.on_primary_then_broadcast("MODEL_DIR", claim)
        )
        jobs.prepare_process(setup)

        def save_config() -> None:
            if distributed.is_primary():
                run_folder.write_operative(setup.folder, gin.operative_config_str())

        do = {
            "train": lambda: jobs.train(setup, dense=dense),
            "baselines": lambda: jobs.baselines(setup),
            "decode": lambda: jobs.decode_test(setup, dense=dense),
            "eval": lambda: jobs.evaluate(setup, dense=dense),
            "report": lambda: jobs.report(setup, dense=dense, save_config=save_config),
            "demo": lambda: jobs.demo(setup, dense=dense, save_config=save_config),
        }[parsed.job]
        try:
            if parsed.job in SHARED:
                do()
            else:
                distributed.on_primary_then_broadcast(parsed.job, lambda: (do(), None)[1])
        finally:
            save_config()


def look(setup: "Setup", parsed: argparse.Namespace, config: Mapping[str, str]) -> None:
    """`m4 data <look>`: no mesh is made, so that no accelerator is touched."""
    import gin

    from m4 import data_jobs
    from m4.storage import run_folder

    options = {name: getattr(parsed, name) for name in DATA_JOBS[parsed.look].options}
    with run_folder.locked(setup.folder):
        run_folder.claim(setup.folder, config, gin.config_str(), mutable=_mutable(config))
        try:
            getattr(data_jobs, parsed.look)(setup, **options)
        finally:
            run_folder.write_operative(setup.folder, gin.operative_config_str())


if __name__ == "__main__":
    sys.exit(main())
