"""A file of translations that grows: its lines so far, and what of them is sound, next to it."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from m4.settings import InputError
from m4.storage.files import read_json, whole, write_json


class WorkFile:
    """OUTPUT.partial and its note OUTPUT.partial.json, until all lines are there: then OUTPUT.

    The note is written after the lines it counts, so that whatever kills the process leaves a note
    of lines that are there. What is behind them is written again.

    The file is open, and locked, from the first `append` on: of many outputs few are open at once.

    Attributes:
        output: the file in the end. lines: how many are there. counts: what was counted of them.
        done: the output is there, and stays.
    """

    def __init__(self, output: Path, made_by: Mapping[str, Any], *, overwrite: bool = False):
        """made_by: JSON, all that decides the lines. overwrite: an output that is there is replaced
        in the end, lines that were made by something else now.

        Raises:
            InputError: another process writes it; it was begun from another text, or with another
                model or settings.
        """
        self.output, self.done = output, output.exists() and not overwrite
        self._partial = output.with_name(f"{output.name}.partial")
        self._note = output.with_name(f"{output.name}.partial.json")
        self._made_by, self._overwrite = json.loads(json.dumps(made_by)), overwrite
        self.lines, self.counts = 0, Counter[str]()
        self._file: IO[bytes] | None = None
        if not self.done and self._partial.exists():
            with self._locked():
                self._sound_bytes()

    def _opened(self) -> IO[bytes]:
        """The lines so far, locked until `close` or `finish`."""
        if self._file is None:
            known, self._file = self.lines, self._locked()
            self._file.truncate(self._sound_bytes())
            if self.lines != known:
                raise self._at_work()
        return self._file

    def _at_work(self) -> InputError:
        return InputError(f"{self.output}: another m4 decode is at work on it")

    def _locked(self) -> IO[bytes]:
        file = self._partial.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Else it became the output between the two lines above.
            mine = os.path.samestat(os.fstat(file.fileno()), self._partial.stat())
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            file.close()
            raise self._at_work()
        return file

    def _sound_bytes(self) -> int:
        """How much of the file counts; sets its lines and counts."""
        overwrite, self.lines, self.counts = self._overwrite, 0, Counter[str]()
        try:
            note = read_json(self._note, _checked, "--overwrite begins again")
        except FileNotFoundError:
            return 0
        except InputError:
            if overwrite:
                return 0
            raise
        before, now = note["made_by"], self._made_by
        # A setting that is the default is in neither.
        if different := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
            if overwrite:
                return 0
            raise InputError(
                f"{self._partial}: was begun with another {different[0]} "
                f"({before.get(different[0])}, now {now.get(different[0])}); --overwrite begins "
                "again"
            )
        if self._partial.stat().st_size < note["bytes"]:
            print(f"{self._partial}: shorter than in its note; starting over", file=sys.stderr)
            self._note.unlink()
            return 0
        self.lines, self.counts = note["lines"], Counter(note["counts"])
        return note["bytes"]

    def append(self, lines: Sequence[str], counts: Mapping[str, int]) -> None:
        """The next lines, and what was counted of them.

        Raises:
            InputError: another process writes the file meanwhile.
        """
        file = self._opened()
        file.write("".join(f"{line}\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())
        self.lines += len(lines)
        self.counts.update(counts)
        write_json(
            self._note,
            {"made_by": self._made_by, "lines": self.lines, "bytes": file.tell(),
             "counts": self.counts},
        )  # fmt: skip

    def finish(self) -> None:
        """Makes it the output, packed where that ends in .gz."""
        file = self._opened()
        if self.output.suffix == ".gz":
            with (
                whole(self.output) as packed,
                self._partial.open("rb") as plain,
                packed.open("wb") as packed_file,
                # Without a time and a name, so that equal lines are equal files.
                gzip.GzipFile("", "wb", fileobj=packed_file, mtime=0) as into,
            ):
                shutil.copyfileobj(plain, into)
            self._partial.unlink()
        else:
            os.replace(self._partial, self.output)
        self._note.unlink(missing_ok=True)
        file.close()
        self.done = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _checked(note: dict[str, Any]) -> dict[str, Any]:
    kinds = {"made_by": dict, "lines": int, "bytes": int, "counts": dict}
    for name, kind in kinds.items():
        if not isinstance(note.get(name), kind):
            raise ValueError(f"no {name}")
    return note
