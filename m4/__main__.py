"""The command line, and the only importer of gin: `m4 train|decode|eval|report|translate|demo`."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

JOBS = {
    "train": "train the model, from its latest checkpoint where there is one",
    "baselines": "train the bilingual baselines that are missing",
    "decode": "translate the test sets with the trained model",
    "eval": "score the translations (they are made first where they are missing)",
    "report": "scores, ΔBLEU table, plot and report.html from what is decoded",
    "demo": "all of it, in turn: train, baselines, decode, report",
    "translate": "translate the arguments, or standard input line by line",
}


class UserError(Exception):
    """One line for the user; exit status 2."""


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
        job.add_argument("--gin_file", action="append", default=[], help="config; may be repeated")
        job.add_argument("--gin_search_paths", default=".", help="comma-separated folders")
        job.add_argument("--gin_bindings", action="append", default=[], metavar="'NAME = VALUE'")
        job.add_argument("--model_dir", help="MODEL_DIR; alone: with the config that is there")
        job.add_argument("--debug", action="store_true", help="show where an error was raised")
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


def gin_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits off --gin.NAME=VALUE: (other arguments, ["NAME = VALUE", ...])."""
    others, bindings = [], []
    for argument in arguments:
        if match := re.match(r"--gin\.([^=]+)=(.*)", argument, re.DOTALL):
            bindings.append(f"{match[1]} = {match[2]}")
        else:
            others.append(argument)
    return others, bindings


def parse_config(arguments: argparse.Namespace, bindings: Sequence[str]) -> dict[str, str]:
    """Reads the gin files and bindings; returns all bindings as text. UserError names the place."""
    import gin

    files = list(arguments.gin_file)
    if not files and arguments.model_dir:
        files = [str(Path(arguments.model_dir) / "config.gin")]
        if not Path(files[0]).is_file():
            raise UserError(f"--model_dir={arguments.model_dir}: no config.gin there; train first")
    if not files:
        raise UserError("give a config: --gin_file=gin_configs/demo.gin, or --model_dir=...")
    bindings = [*arguments.gin_bindings, *bindings]
    if arguments.model_dir:
        bindings.append(f"MODEL_DIR = {str(arguments.model_dir)!r}")
    for path in arguments.gin_search_paths.split(","):
        gin.add_config_file_search_path(path)
    for name in files:
        folders = [Path(p) for p in (*arguments.gin_search_paths.split(","), ".")]
        if not any((folder / name).is_file() for folder in folders):
            raise UserError(
                f"--gin_file={name}: no such file in {arguments.gin_search_paths} "
                "(--gin_search_paths)"
            )
    try:
        with gin.unlock_config():
            gin.parse_config_files_and_bindings(files, bindings, finalize_config=False)
    except (ValueError, SyntaxError, OSError, ImportError, AttributeError, NameError) as error:
        raise UserError(f"config: {one_line(error)}") from error
    text = gin.config_str(max_line_length=1_000_000)
    values = dict(re.findall(r"^([\w./]+) = (.*)$", text, re.MULTILINE))
    used = set(re.findall(r"%([\w./]+)", text))
    macros = [name for name in values if "." not in name]
    for name in macros:
        if name not in used:
            near = difflib.get_close_matches(name, used | set(macros) - {name}, n=1)
            raise UserError(
                f"config: {name} is set and nothing uses it"
                + (f"; did you mean {near[0]}?" if near else "")
            )
    return values


def one_line(error: BaseException) -> str:
    """An error's message in one line; gin adds lines of its own, of which the place is kept."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, SyntaxError) and error.filename:
        lines[0] += f" ({error.filename}, line {error.lineno})"
    places = [line for line in lines[1:] if " line " in line or line.startswith("In bindings")]
    return " ".join([lines[0] if lines else type(error).__name__, *places[:1]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one job; returns the exit status: 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    others, bindings = gin_arguments(sys.argv[1:] if arguments is None else arguments)
    parsed = parser().parse_args(others)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        run(parsed, bindings)
    except (UserError, ValueError) as error:
        if parsed.debug:
            raise
        print(f"m4 {parsed.job}: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        said = one_line(error) if str(error) else "interrupted; the same command goes on"
        print(f"m4 {parsed.job}: {said}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0  # `m4 translate | head`
    return 0


def run(parsed: argparse.Namespace, bindings: Sequence[str]) -> None:
    """Configures and runs the job."""
    config = parse_config(parsed, bindings)
    import gin

    from m4 import jobs
    from m4.core import run_folder

    with gin.unlock_config():
        try:
            setup = gin.get_configurable(jobs.Setup)()
        except RuntimeError as error:  # gin.REQUIRED without a value
            raise UserError(f"config: {one_line(error)}") from error
        except TypeError as error:  # an argument without default and without binding
            raise UserError(f"config: {one_line(error)}") from error
    if parsed.job == "translate":
        jobs.prepare_process(setup)
        translator = jobs.translator(setup)
        if parsed.text:
            for line in translator.translate(parsed.text, parsed.to):
                print(line, flush=True)
        else:
            translator.stream(sys.stdin.fileno(), parsed.to, sys.stdout)
        return
    dense = parsed.compare == "dense"
    with run_folder.locked(setup.folder):
        text = gin.config_str()
        run_folder.claim(setup.folder, config, text, fresh=getattr(parsed, "fresh", False))
        jobs.prepare_process(setup)
        try:
            if parsed.job == "train":
                jobs.train(setup, dense=dense)
            elif parsed.job == "baselines":
                jobs.baselines(setup)
            elif parsed.job == "decode":
                jobs.decode_test(setup, dense=dense)
            elif parsed.job == "eval":
                jobs.evaluate(setup, dense=dense)
            elif parsed.job == "report":
                jobs.report(setup, dense=dense)
            else:
                jobs.demo(setup, dense=dense)
        finally:
            run_folder.atomic_write(
                setup.folder / "operative_config.gin", gin.operative_config_str()
            )


if __name__ == "__main__":
    sys.exit(main())
