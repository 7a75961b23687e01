"""m4's command line inside the test's process, and what it leaves in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from m4 import config
from m4.cli.main import main
from m4.experiment import Experiment

TINY = Path(__file__).parent / "testdata" / "tiny.gin"
# The environment of a process with one device, as on a machine without an accelerator.
ALONE = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}


@dataclass(frozen=True)
class Said:
    """The output of a command, and its exit status."""

    status: int
    out: str
    err: str

    def ok(self) -> Said:
        """Returns the output, after asserting that the command succeeded."""
        assert self.status == 0, self.err
        return self

    @property
    def mistake(self) -> str:
        """Returns the one line of a mistake."""
        assert self.status == 2, self.err or self.out
        *before, line = self.err.splitlines()
        assert not before, self.err
        assert "Traceback" not in line
        return line


def m4(*arguments: object) -> Said:
    """Runs `m4 ARGUMENTS`."""
    out, err = io.StringIO(), io.StringIO()
    given = [str(argument) for argument in arguments]
    started = mock.patch.object(sys, "argv", ["m4", *given])  # commands to paste begin with it
    with started, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(given)
    return Said(status, out.getvalue(), err.getvalue())


def experiment_of(path: Path, *bindings: str) -> Experiment:
    """Returns the experiment of a gin file with bindings ("NAME = VALUE") on top."""
    return config.load([path], bindings).experiment()


def config_and_experiment(path: Path, *bindings: str) -> tuple[config.Config, Experiment]:
    """Returns a gin file's config with bindings ("NAME = VALUE") on top, and its experiment."""
    made = config.load([path], bindings)
    return made, made.experiment()


def contents(folder: Path) -> dict[str, str]:
    """Returns file -> SHA-256 of all that a job made in a folder, without locks and records."""
    records = {"run.json", "config.gin", "operative_config.gin"}
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in records and not path.name.startswith(".lock")
    }


def descendants(mark: Path) -> list[int]:
    """Returns the processes that run and were started with M4_TEST=`mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if b"M4_TEST=" + os.fsencode(mark) in environment:
            found.append(int(path.parent.name))
    return found
