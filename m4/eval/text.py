"""Text files and their translations: lines in, and one file of translations per language out."""

import functools
import gzip
import hashlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from etils import epath

from m4.data.sources.reading import files
from m4.data.sources.reading.lines import text_lines
from m4.parallel import distributed
from m4.settings import InputError, counted
from m4.storage.files import parsed, undamaged, whole
from m4.storage.records import count, named, record, text

_LINE = record({"line": text, "counts": named(count)})

STANDARD = "-"
# Maximum bytes of a line. Even a book without line breaks is shorter.
_MOST_LINE_BYTES = 1 << 26


class Text(NamedTuple):
    """A UTF-8 file of lines, plain or compressed as .gz, .zst, .xz or .bz2."""

    path: epath.Path
    shown: str

    @property
    def stem(self) -> str:
        """Name without .txt, .gz and the like; translations are in STEM.xx.txt."""
        return files.unpacked(self.path.name).removesuffix(".txt")

    def lines(self) -> Iterator[str]:
        """Yields lines without line breaks. Raises InputError if one is not text or over 64 MiB."""
        yield from text_lines(self.path, _MOST_LINE_BYTES, self.shown)

    def checked(self) -> tuple[int, str]:
        """Reads all lines, and returns their number and SHA-256."""
        count, digest = 0, hashlib.sha256()
        for line in self.lines():
            digest.update(line.encode() + b"\n")
            count += 1
        return count, digest.hexdigest()


def aligned_lines(*paths: Path) -> list[list[str]]:
    """Returns the lines of parallel files."""
    found: list[list[str]] = []
    for path in paths:
        try:
            found.append([*Text(epath.Path(path), str(path)).lines()])
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
        if len(found[-1]) != len(found[0]):
            raise InputError(
                f"{paths[0]} has {len(found[0])} lines, {path} {len(found[-1])}: must be as many"
            )
    return found


def texts_of(inputs: Sequence[str]) -> list[Text]:
    """Returns the files of --input; a folder stands for all files in it that are not hidden."""
    found = []
    for name in inputs:
        path = epath.Path(name)
        inside = [path]
        if path.is_dir():
            inside = sorted(each for each in path.iterdir() if not each.name.startswith("."))
            if not inside:
                raise InputError(f"--input={name}: no files in this folder")
        elif not path.exists():
            raise InputError(f"--input={name}: no such file")
        elif os.path.exists(name) and not os.path.isfile(name):  # a pipe
            raise InputError(
                f"--input={name}: can be read only once; give a file, or - for standard input"
            )
        if wrong := [each for each in inside if each.is_dir() or not each.exists()]:
            raise InputError(f"{os.fspath(wrong[0])}: no file; of a folder its own files are read")
        found += [Text(each, name if each is path else os.fspath(each)) for each in inside]
    return found


@dataclass
class Output:
    """Translations of a text into a language, written line by line.

    Until complete, they are in PATH.partial: a JSON line each, after a first line with everything
    that decides them. If the process is killed, the next one counts these lines and continues; a
    last line that was cut is dropped. With several processes, the primary one writes.
    """

    text: Text
    to: str
    path: Path | None  # the final file, or None for standard output
    lines: int = 0  # number of finished lines
    whole: int = 0  # number of lines of the text
    counts: Counter[str] = field(default_factory=Counter)  # sums of the counts of lines
    done: bool = False  # whether the final file exists
    _head: bytes = b""
    _bytes: int = 0

    @property
    def _partial(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.partial")

    def begin(self, made_by: Mapping[str, Any], whole: int, overwrite: bool) -> None:
        """Counts the finished lines of an earlier job.

        Args:
            made_by: JSON of everything that decides the lines. Other lines raise InputError.
            overwrite: Whether to replace an existing file or other lines.
        """
        self.whole, self._head = whole, json.dumps(made_by).encode() + b"\n"
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not overwrite:
            print(f"{self.path}: already there (--overwrite replaces it)")
            self.done = True
            return
        if self._partial.exists():
            with self._partial.open("r+b") as file:
                try:
                    with undamaged(self._partial, "--overwrite begins again"):
                        self._count(file)
                except InputError:
                    if not overwrite:
                        raise
                    self.lines, self._bytes, self.counts = 0, 0, Counter()
                file.truncate(self._bytes)  # the last line may be cut
        self._finish()

    def _count(self, file: IO[bytes]) -> None:
        """Counts finished lines. Raises InputError if they are of another text or model."""
        head = file.readline()
        if not head.endswith(b"\n"):
            return
        before, now = parsed(head), json.loads(self._head)
        for name in {**now, **before}:
            if before.get(name) != now.get(name):  # a default may be missing in both
                raise InputError(
                    f"{self._partial}: was begun with another {name} ({before.get(name)}, now "
                    f"{now.get(name)}); --overwrite begins again"
                )
        self._bytes = len(head)
        for line in itertools.takewhile(lambda line: line.endswith(b"\n"), file):
            self.counts.update(parsed(line, _LINE)["counts"])
            self.lines, self._bytes = self.lines + 1, self._bytes + len(line)

    def append(self, lines: Sequence[str], counts: Sequence[Mapping[str, int]]) -> None:
        """Writes the next lines and their counts. Raises InputError if another job writes too."""
        self.lines += len(lines)
        self.counts += sum(map(Counter, counts), Counter[str]())
        if not distributed.is_primary():
            return
        if self.path is None:
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()
            return
        rows = ({"line": line, "counts": each} for line, each in zip(lines, counts, strict=True))
        said = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
        size = self._partial.stat().st_size if self._partial.exists() else 0
        if size != self._bytes:
            raise InputError(f"{self.path}: another m4 decode is at work on it")
        with self._partial.open("ab") as file:
            file.write(said if self._bytes else self._head + said)
            file.flush()
            os.fsync(file.fileno())
            self._bytes = file.tell()
        self._finish()

    def _finish(self) -> None:
        """Makes the final file of all lines, compressed if its name ends in .gz."""
        if self.path is None or self.lines < self.whole:
            return
        # Compressed without time and name, so that equal lines give equal files.
        packed = functools.partial(gzip.GzipFile, "", "wb", 9, mtime=0)
        made = packed if self.path.suffix == ".gz" else nullcontext
        with whole(self.path) as unfinished, unfinished.open("wb") as plain, made(plain) as file:
            if self.whole:
                with self._partial.open("rb") as partial:
                    for row in itertools.islice(partial, 1, None):
                        file.write(json.loads(row)["line"].encode() + b"\n")
        self._partial.unlink(missing_ok=True)
        self.done = True
        print(f"{self.path}: {counted(self.whole, 'line')}")


def outputs_of(
    inputs: Sequence[str],
    texts: Sequence[Text],
    targets: Sequence[str],
    output: str,
    suffix: str = "txt",
) -> list[Output]:
    """Returns the output of every text in every language.

    It is the file `output` for one text and one language, otherwise `output`/STEM.xx.suffix.
    """
    pairs, place = [(text, to) for text in texts for to in targets], Path(output)
    if output == STANDARD and len(pairs) == 1:
        return [Output(*pairs[0], None)]
    several = len(pairs) > 1 or Path(inputs[0]).is_dir()
    if (several and place.is_file()) or output == STANDARD:
        raise InputError(f"--output={output}: of several translations it must be a folder")
    if not place.absolute().parent.is_dir():
        raise InputError(f"--output={output}: no folder {place.parent}")
    made = [Output(*pairs[0], place)]
    if several or place.is_dir() or output.endswith(os.sep):
        made = [Output(text, to, place / f"{text.stem}.{to}.{suffix}") for text, to in pairs]
    read = {Path(name).resolve() for name in inputs}
    taken: dict[Path | None, Text] = {}
    for one in made:
        if (other := taken.setdefault(one.path, one.text)) is not one.text:
            raise InputError(
                f"--output={output}: {other.shown} and {one.text.shown} would both be "
                f"{os.path.basename(str(one.path))}"
            )
        real = Path(str(one.path)).resolve()
        if {real, *real.parents} & read:
            raise InputError(f"--output={output}: {one.path} would be among the input")
    return made
