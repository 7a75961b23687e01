"""The commands of a block as the shell makes them, and how each is run or only checked."""

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

from m4.cli.main import COMMANDS, parse
from m4.jobs.command import read_config
from m4.parallel.platform.machines import topology
from tests.documents.blocks import ROOT

# Programs of others, which no test can run.
UNRUN = {"cd", "gcloud", "git"}
LAUNCHERS = {"srun": 0, "taskset": 2}  # program -> how many words come before the command
PROGRAMS = {"make", "python", *LAUNCHERS, *UNRUN}
PATHS = [".venv/bin/m4", ".venv/bin/python", "peer/bin/python"]
PATHS += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "scripts").glob("*.sh"))]
NUMBER = r"[+−-]?\d([\d.,:]*\d)?\*?"


def words_of(text: str, folder: Path) -> list[list[str]]:
    """Returns what the shell would call, in its order: each program only notes its words.

    folder: an empty one. A program that no test knows is an AssertionError.
    """
    calls = folder / "calls"
    calls.mkdir(parents=True)
    for name in [*(f"bin/{program}" for program in PROGRAMS), *PATHS]:
        word = name.removeprefix("bin/").removeprefix(".venv/bin/")
        noted = f'printf \'%s\\0\' {word} "$@" >"$(printf \'%s/%06d\' {calls} "$BASHPID")"'
        write_program(folder / name, noted)
    setting = f"set -euo pipefail; enable -n cd; PATH={folder / 'bin'}; BASH_ENV=\n"
    said = subprocess.run(
        ["/bin/bash", "-c", setting + text], cwd=folder, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    noted = sorted(calls.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return [path.read_text(encoding="utf-8").split("\0")[:-1] for path in noted]


def write_program(path: Path, text: str) -> None:
    """Writes a program for the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def dry_run_all(commands: str, folder: Path) -> None:
    """Checks a block's commands without running them; folder: an empty one."""
    calls = words_of(commands, folder)
    assert calls, "no commands"
    for words in calls:
        dry_run(words)


def dry_run(words: list[str]) -> None:
    """Checks a command without running it; an AssertionError or InputError: it is wrong."""
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program in LAUNCHERS:
        dry_run(rest[LAUNCHERS[program] :])
    elif program == "m4":
        m4(rest)
    elif program == "make":
        assert made_by(rest)
    elif program.startswith("scripts/"):
        script(program, rest)
    elif program.endswith("python"):
        python(rest, peers=program.startswith("peer"))
    else:
        assert program in UNRUN, f"not in UNRUN of tests/documents/commands.py: {words}"


def m4(rest: list[str]) -> None:
    """Reads the arguments and the config, and makes its experiment."""
    parsed = parse(rest)
    if parsed.command == "plan" and parsed.topology:
        topology(parsed.topology)
    if getattr(parsed, "gin_file", None):
        read_config(parsed).experiment()


def made_by(rest: list[str]) -> str:
    """Returns the commands that make would run, except for the set-up."""
    said = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "--old-file=setup", *rest], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    return said.stdout


def script(program: str, rest: list[str]) -> None:
    """Runs the script's own dry run; a job after -- is checked as a command of m4."""
    command = ["bash", str(ROOT / program), rest[0], "--dry_run", *rest[1:]]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": os.devnull}
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout
    behind = rest[rest.index("--") + 1 :] if "--" in rest else []
    if behind and behind[0] in COMMANDS:
        m4(behind)


class Parsed(Exception):
    """Raised when a program has read its arguments."""


def python(rest: list[str], *, peers: bool = False) -> None:
    """Compiles the text of -c, or has a benchmark or a package of -m read its arguments."""
    first, *arguments = rest
    if first == "-m":
        package, *arguments = arguments
        first = f"{package.replace('.', '/')}/__main__.py"
    if first == "-c":
        compile(arguments[0], "-c", "exec")
        return
    with _only_arguments(peers) as read, mock.patch.object(sys, "argv", [first, *arguments]):
        try:
            runpy.run_path(str(ROOT / first))["main"]()
        except Parsed:
            pass
        else:
            raise AssertionError(f"{first} reads no arguments")
    if getattr(read[0], "vs", None):
        python([first, *shlex.split(read[0].vs)], peers=peers)
    for command in getattr(read[0], "commands", []):
        dry_run(shlex.split(command))


@contextmanager
def _only_arguments(peers: bool) -> Iterator[list[argparse.Namespace]]:
    """Makes programs end once they have read their arguments, also where peers are missing."""
    read = []
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *given) -> argparse.Namespace:
        try:
            read.append(parse(self, *given))
        except SystemExit as error:
            raise AssertionError(f"{sys.argv}: not its arguments") from error
        raise Parsed

    others = {name: types.ModuleType(name) for name in ("torch", "transformers")}
    path = [str(ROOT / "benchmarks"), *sys.path]
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only),
        mock.patch.dict(sys.modules, others) if peers else nullcontext(),
        mock.patch.object(sys, "path", path),
    ):
        yield read


def is_like(line: str, printed: str) -> bool:
    """Tells if a documented line equals the printed one, up to numbers, spaces and "..."."""
    parts = [re.escape(_shape(part)) for part in line.split("...")]
    return re.fullmatch(".*".join(parts), _shape(printed)) is not None


def _shape(line: str) -> str:
    return "".join(re.sub(NUMBER, "0", line).split())
