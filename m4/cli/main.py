"""`m4 COMMAND ...`: reads the arguments, runs the command and returns the exit status.

The chosen command's module alone is imported, and imports nothing heavy: help appears at once.
"""

import argparse
import atexit
import contextlib
import errno
import gc
import importlib
import os
import re
import resource
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.jobs import streams
from m4.parallel.distributed_options import distributed_options
from m4.parallel.platform import signals
from m4.parallel.platform.hardware import package_version, restart_with_huge_pages
from m4.settings import InputError, first_line, pasted
from m4.storage.files import check_output, follow_links
from m4.storage.objects import Unreachable

# Command -> help. The command is the module m4.jobs.<command>.
COMMANDS = {
    "new": "look at a folder of sentence pairs, and write a config for it",
    "train": "train the model, from its latest checkpoint where there is one",
    "baselines": "train the bilingual baselines that are missing",
    "decode": "translate the test sets, or files of text, with the trained model",
    "eval": "score the test sets, translating them first if needed; --watch: each checkpoint",
    "score": "compute the log-probability of references, or of your own translations",
    "score_files": "score files of translations, with intervals and failure rates; needs no run",
    "report": "write scores, ΔBLEU, a plot and report.html from the translations; trains nothing",
    "demo": "run all steps: train, baselines, decode, report",
    "average": "make a run folder with the mean of several checkpoints' parameters",
    "translate": "translate the arguments, or standard input line by line",
    "data": "build or inspect the corpus: prepare, preview, vocabulary, batch, cleaning_report, "
    "list, remove",
    "watch": "show a training run from its files: loss, speed, experts, time left, scores",
    "checkpoint": "list, verify, inspect or convert a run's checkpoints; trim a pretrained model",
    "extract": "make a run folder with only the experts and pieces that some directions need",
    "export": "write a run's model for T5X to continue from, or for transformers and CTranslate2",
    "atlas": "show which language goes to which expert, in tables and atlas.png",
    "plan": "compile for TPUs or GPUs that need not be there: memory, traffic, time, cost",
}
# The commands of `m4 data`: the modules m4.jobs.data.<command>.
DATA_COMMANDS = {
    "prepare": "build the corpus in MODEL_DIR/data, or in experiment.Data.data_dir for several "
    "runs",
    "preview": "show how often each language would be seen, and write data_preview.json",
    "vocabulary": "measure how the vocabulary splits each language: pieces per sentence, bytes",
    "batch": "print the sentence pairs of a training step, with their direction, lengths and place",
    "cleaning_report": "report what cleaning drops, changes and flags, and why: data_report.html",
    "list": "list the corpora of folders, and the runs that use them",
    "remove": "remove corpora that no given run uses",
}
_GIN = (
    "Any setting can be given as --gin.NAME=VALUE: --gin.TRAIN_STEPS=2000,\n"
    "--gin.schedules.rsqrt.peak=1e-3, --gin.MODEL_DIR=runs/mine. Names of flags may have - for _."
)

# What users of T5X type -> m4's name for it.
_T5X_COMMANDS = {"infer": "decode", "evaluate": "eval", "finetune": "train", "pretrain": "train"}
_T5X_FLAGS = {
    "--run_mode": "the command is the first word: train, eval or decode",
    "--gin_bindings_file": "give a second --gin_file",
    "--tfds_data_dir": "set tfds.Tfds.data_dir in the config",
}
_AGAIN = "files written before are complete: the same command resumes (--debug shows the traceback)"
# Errors of the machine, not of the user or m4: the same command works when the machine allows it.
_REFUSALS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE,
    errno.ENFILE, errno.EIO, errno.ESTALE, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR,
    errno.EISDIR, errno.ENXIO, errno.ENOMEM,
)  # fmt: skip
# Messages of Python and of the loader of shared libraries.
_WORDS = ("failed to map segment from shared object", "can't start new thread", "std::bad_alloc")
# Open files and bytes that a job may need with all its libraries, beyond its model. Systems allow
# 256 files or more. A compiler that gets no memory hangs or aborts.
_LEAST_FILES, _LEAST_BYTES = 256, 2 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    The status is 0 for success; 1 if another process of the job was lost, another job works in
    MODEL_DIR, the machine refuses something (a full disk), or the last files could not be uploaded;
    2 for a mistake of the user; 3 if another job has taken over MODEL_DIR; 130 for Ctrl-C and for
    training that saved its step; 128 plus the signal's number for other signals.

    Args:
        arguments: Words after `m4`. Defaults to those of this program, which may then restart or
            end the process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        streams.open_closed()
    try:
        check_text(given)
        parsed = parse(given)
    except InputError as error:
        print(f"m4: {first_line(error)}", file=sys.stderr)
        return 2
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # TensorFlow, which the source Tfds needs, would otherwise take all memory of a GPU.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    if arguments is None:  # the program itself, not a call from another one
        if parsed.command == "translate":
            # Collecting garbage during the imports takes a tenth of the time until the first
            # line; the command turns it on again when the model is loaded.
            gc.disable()
        restart_with_huge_pages()
        signals.watch()
        if parsed.processes is not None:
            return run_together(parsed)
    status = run_alone(parsed)
    if arguments is None:
        status = flushed(status, f"m4 {parsed.command}")
        if status > 128:
            # After a signal a step may still be running. A normal exit would free its memory and
            # crash.
            atexit._run_exitfuncs()
            os._exit(status)
    return status


def run_together(parsed: argparse.Namespace) -> int:
    """Runs a command as one of several processes, and ends the process where it fails."""
    from m4.parallel import distributed

    status = distributed.PEER_LOST_STATUS
    try:
        status = run_alone(parsed)
        if status == 0:
            distributed.shutdown()
    except distributed.PEER_LOST_ERRORS as error:
        status = distributed.PEER_LOST_STATUS
        said = distributed.peer_lost(error)
        if said is None:
            raise
        print(f"m4 {parsed.command}: {said}", file=sys.stderr)
    finally:
        if status != 0:
            if sys.exception() is not None:
                traceback.print_exc()
            # A normal exit would wait for the other processes.
            distributed.abort_process(status)
    return status


def run_alone(parsed: argparse.Namespace) -> int:
    """Runs a command and returns the exit status; raises errors that are not the user's."""
    try:
        if getattr(parsed, "follow_links", False):
            follow_links()
        _check_outputs(parsed)
        check_limits()
        return parsed.do(parsed) or 0
    except BaseException as error:
        # Checked first: a signal during an import shows as an ImportError or a config's InputError.
        if (status := signals.status_of(error)) is not None:
            said = signals.message(error)
        elif isinstance(error, BrokenPipeError):
            return 0  # `m4 translate | head`
        elif parsed.debug:
            raise
        elif isinstance(error, InputError | Unreachable):
            said, status = first_line(error), error.status
        elif (said := refused(error)) is not None:
            again = f"; {_AGAIN}" if hasattr(parsed, "multiprocess") else ""
            said, status = f"{said}{again}", 1
        else:
            raise
        with contextlib.suppress(OSError):  # a full disk may hit standard error, too
            print(f"m4 {parsed.command}: {said}", file=sys.stderr)
        return status


def _check_outputs(parsed: argparse.Namespace) -> None:
    """Raises InputError where a command could not write the file or folder of its result."""
    for flag in ("output", "out"):
        value = getattr(parsed, flag, None)
        for one in map(str, value if isinstance(value, list) else [value]):
            if value is not None and not re.match(r"-$|\w+://", one):  # standard output, addresses
                check_output(Path(one), f"--{flag}={one}")


# ---- Errors of the machine, not of the user: a full disk, a file that may not be read


def check_limits() -> None:
    """Raises the limit of open files. OSError: too few files or too little memory are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if 0 <= soft < _LEAST_FILES:
        said = f"{soft} are allowed (ulimit -n), m4 needs {_LEAST_FILES}"
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: {said}")
    for kind, flag in ((resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d")):
        if 0 <= (soft := resource.getrlimit(kind)[0]) < _LEAST_BYTES:
            allowed, needed = (f"{number >> 10:,}" for number in (soft, _LEAST_BYTES))
            said = f"{allowed} KiB are allowed (ulimit -{flag}), m4 needs {needed}"
            raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {said}")


def refused(error: BaseException | None) -> str | None:
    """Returns one line on what the machine refused, also to C++ libraries, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{os.strerror(error.errno) if where else error.strerror}"
        if isinstance(error, MemoryError):
            return os.strerror(errno.ENOMEM)
        if found := next((one for one in _WORDS if one in str(error)), None):
            return f"{found} ({type(error).__name__}): too little memory, or too many processes"
        for number in _REFUSALS:
            if not isinstance(error, OSError) and os.strerror(number) in str(error):
                return f"{os.strerror(number)} ({type(error).__name__})"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def check_text(arguments: Sequence[str]) -> None:
    """Raises InputError for an argument that is not UTF-8."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise InputError(f"argument {number}, {shown!r}: not UTF-8") from error


def flushed(status: int, name: str) -> int:
    """Flushes standard output; returns `status`, or 1 if that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Otherwise Python would try again at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if status == 0 and not isinstance(error, BrokenPipeError):  # `m4 report | head` is quiet
            print(f"{name}: standard output: {error.strerror}", file=sys.stderr)
            return 1
    return status


# The arguments.


def parse(given: Sequence[str], environment: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Reads the words after `m4`; environment variables may name a cluster of processes.

    The result has the command's arguments, `command` as typed ("data preview"), `do`, the function
    that runs it, and `processes`: how this process joins others, or None if it is alone. Raises
    SystemExit after argparse has printed help or a mistake.
    """
    others, bindings = split_arguments(given)
    about = "Train, evaluate and use massively multilingual translation models."
    top = argparse.ArgumentParser(pasted(), description=about, epilog=_GIN, allow_abbrev=False)
    version = "show the versions of m4 and jax, and the devices that jax computes on"
    top.add_argument("--version", action=_Version, nargs=0, help=version)
    _add_commands(top, COMMANDS, "m4.jobs", others)
    arguments, rest = top.parse_known_args(others)
    if hasattr(arguments, "text") and not any(word.startswith("-") for word in rest):
        arguments.text += rest  # argparse takes texts only before the first flag or after the last
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if hasattr(arguments, "gin_bindings"):
        arguments.gin_bindings = [*arguments.gin_bindings, *bindings]
    elif bindings:
        raise InputError(f"'{bindings[0]}': m4 {arguments.command} reads no config")
    arguments.processes = None
    if hasattr(arguments, "multiprocess"):
        arguments.processes = distributed_options(environment, arguments)
    return arguments


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import jax

        from m4.parallel.platform.jax_setup import check_accelerator

        try:
            check_accelerator()
            place = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        except InputError as error:
            place = str(error)
        print(f"m4 {package_version('m4')}, jax {jax.__version__}: {place}")
        parser.exit()


def _add_commands(
    parser: argparse.ArgumentParser, helps: Mapping[str, str], package: str, words: Sequence[str]
) -> None:
    """Adds sub-commands; only the one that the first word names gets its arguments."""
    commands = parser.add_subparsers(dest="name", required=True, metavar="command")
    for name, text in helps.items():
        if name not in words[:1]:
            commands.add_parser(name, help=text)
            continue
        about, form = f"{text[0].upper()}{text[1:]}.", argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(name, help=text, description=about, formatter_class=form,
                                   allow_abbrev=False)  # fmt: skip
        if name == "data":
            _add_commands(made, DATA_COMMANDS, f"{package}.data", words[1:])
            continue
        module: Any = importlib.import_module(f"{package}.{name}")
        made.add_argument("--debug", action="store_true", help="show where an error was raised")
        module.add_arguments(made)
        has_config = made.get_default("gin_bindings") is not None
        example = f"Example: {pasted()}{module.EXAMPLE.removeprefix('m4')}"
        made.epilog = "\n".join([example, *([_GIN] if has_config else [])])
        typed = f"{package}.{name}".removeprefix("m4.jobs.").replace(".", " ")
        made.set_defaults(command=typed, do=module.run)


def split_arguments(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits off --gin.NAME=VALUE as "NAME = VALUE"; --a-b becomes --a_b.

    InputError: A flag or command has T5X's name; the message has m4's.
    """
    others: list[str] = []
    bindings = []
    for position, argument in enumerate(given):
        if match := re.match(r"--gin\.([^=]+)=(.*)", argument, re.DOTALL):
            bindings.append(f"{match[1]} = {match[2]}")
            continue
        if argument == "--":
            return [*others, *given[position:]], bindings
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = "--" + name[2:].replace("-", "_")
            argument = name + equals + value
            if said := _T5X_FLAGS.get(name):
                raise InputError(f"{name}: {said}")
        elif not others and argument in _T5X_COMMANDS:
            raise InputError(f"{argument}: m4's name is `{pasted(_T5X_COMMANDS[argument])}`")
        elif others in ([], ["data"]):
            argument = argument.replace("-", "_")
        others.append(argument)
    return others, bindings
