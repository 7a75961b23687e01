"""What is wrong with what a user gave: one line, with its place, and what may have been meant."""

import difflib
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


class UserError(Exception):
    """One line for the user; exit status 2."""


def near(name: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?", or nothing where nothing is like it."""
    match = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {match[0]}?" if match else ""


def check_values(values: Mapping[str, str], files: Sequence[Path]) -> None:
    """UserError: a macro that nothing uses or that is not set; a value that must be given."""
    # A percent sign in a string is no macro.
    bare = {
        name: re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "", value)
        for name, value in values.items()
    }
    users = {
        used: name for name, value in bare.items() for used in re.findall(r"%([\w./]+)", value)
    }
    macros = [name for name in values if "." not in name]
    for name, value in bare.items():
        if value == "%gin.REQUIRED":
            raise UserError(f"config: {_place(name, files)}{name} has no value: --gin.{name}=...")
    users.pop("gin.REQUIRED", None)
    for name, user in users.items():
        if name not in values:
            raise UserError(
                f"config: {_place(user, files)}{user} = %{name}, which is not set"
                f"{near(name, macros)}"
            )
    for name in macros:
        if name not in users:
            # Of two that are alike, the misspelt one is the one that nothing uses.
            raise UserError(
                f"config: {_place(name, files)}{name} is set and nothing uses it{near(name, users)}"
            )


def _place(name: str, files: Sequence[Path]) -> str:
    """ "demo.gin line 3: ", where a binding is in one of the files."""
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if re.match(rf"\s*{re.escape(name)}\s*=", line):
                return f"{path} line {number}: "
    return ""


def missing_argument(error: TypeError, config: Mapping[str, str]) -> str | None:
    """What a configurable lacks, by its gin name; None: the error is about something else."""
    who = re.search(r"In call to configurable '(\w+)'", str(error))
    what = re.search(r"No values supplied by Gin or caller for arguments: \[(.*?)\]", str(error))
    if who is None or what is None:
        return None
    uses = re.findall(rf"@(?:\w+/)*((?:\w+\.)*{who[1]})\b", " ".join(config.values()))
    gin_name = uses[0] if uses else f"jobs.{who[1]}"  # nothing refers to Setup
    names = ", ".join(f"{gin_name}.{argument}" for argument in re.findall(r"\w+", what[1]))
    return f"config: {names} must be set"


def is_ours(error: BaseException) -> bool:
    """Whether m4 raised it, for the user; what comes out of a library is a bug, and shown whole."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals["__name__"].split(".")[0] in ("m4", "__main__")


def one_line(error: BaseException) -> str:
    """An error's message in one line: the first; gin adds lines of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
