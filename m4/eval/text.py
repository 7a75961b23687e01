"""Files of text and their translations: lines in, and one file of translations a language out."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from etils import epath

from m4.data.sources.reading import files
from m4.data.sources.reading.lines import text_lines
from m4.parallel import distributed
from m4.settings import InputError, counted
from m4.storage.files import parsed, undamaged, whole
from m4.storage.records import count, named, record, text

_LINE = record({"line": text, "counts": named(count)})

STANDARD = "-"
# Other names of the standard streams.
_STANDARD = {
    "--input": ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"),
    "--output": ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"),
}
# A longer line is no text; lines of a book without line ends are shorter.
_MOST_LINE_BYTES = 1 << 26


class Text(NamedTuple):
    """A file of lines: UTF-8, plain or packed as .gz, .zst, .xz or .bz2."""

    path: epath.Path
    shown: str
    inside: str = ""  # the folders between the folder that was asked for and the file

    @property
    def stem(self) -> str:
        """Name without .gz and the like, and .txt: a file of translations is STEM.xx.txt."""
        return files.unpacked(self.path.name).removesuffix(".txt")

    def lines(self) -> Iterator[str]:
        """Yields the lines without their ends. InputError: a line is no text, or over 64 MiB."""
        yield from text_lines(self.path, _MOST_LINE_BYTES, self.shown)

    def checked(self) -> tuple[int, str]:
        """Reads all lines, and returns their number and SHA-256."""
        count, digest = 0, hashlib.sha256()
        for line in self.lines():
            digest.update(line.encode() + b"\n")
            count += 1
        return count, digest.hexdigest()


def aligned_lines(*paths: Path) -> list[list[str]]:
    """Returns the lines of files that belong together line by line.

    Raises:
        InputError: A file cannot be read, or they have different numbers of lines.
    """
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


def standard(option: str, name: str) -> str:
    """Returns STANDARD for any name of the option's standard stream, else the name."""
    return STANDARD if name in _STANDARD[option] else name


def texts_of(inputs: Sequence[str]) -> list[Text]:
    """Returns the files of --input: each file, and of a folder all that are not hidden, by name.

    Raises:
        InputError: A file is not there or cannot be read twice, a folder has no files, or a link
            leads nowhere or to a folder that it is in.
    """
    found = []
    for name in inputs:
        path = epath.Path(name)
        if path.is_dir():
            inside = [*_files_in(path, "", (os.path.realpath(name),))]
            if not inside:
                raise InputError(f"--input={name}: no files in this folder")
            found += inside
        elif not path.exists():
            raise InputError(f"--input={name}: no such file")
        elif os.path.exists(name) and not os.path.isfile(name):  # a pipe
            raise InputError(
                f"--input={name}: can be read only once; give a file, or - for standard input"
            )
        else:
            found.append(Text(path, name))
    return found


def _files_in(folder: epath.Path, inside: str, above: tuple[str, ...]) -> Iterator[Text]:
    """Yields the files of a folder; `above` are the folders that it is in, without links."""
    # Not rglob, which epath does not have in a bucket.
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if (real := os.path.realpath(path)) in above:
                raise InputError(f"{os.fspath(path)}: a link to a folder that it is in")
            yield from _files_in(path, os.path.join(inside, path.name), (*above, real))
        elif path.exists():
            yield Text(path, os.fspath(path), inside)
        else:
            raise InputError(f"{os.fspath(path)}: a link to nothing")


@dataclass
class Output:
    """The translations of a text into a language, which grow line by line.

    Until all lines are there they are in PATH.partial, a line of JSON each, behind a first line
    that says what decides them. Whatever kills the process, the next one counts these lines and
    goes on; a last line that was cut is dropped. With several processes the primary one writes.
    """

    text: Text
    to: str
    path: Path | None  # the file in the end, or None for standard output
    lines: int = 0  # number of lines that are there
    whole: int = 0  # number of lines that the text has
    counts: Counter[str] = field(default_factory=Counter)  # sums of what was counted of the lines
    done: bool = False  # whether the file is there in the end
    _head: bytes = b""
    _bytes: int = 0

    @property
    def _partial(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.partial")

    def begin(self, made_by: Mapping[str, Any], whole: int, overwrite: bool) -> None:
        """Counts the lines that an earlier job wrote.

        Args:
            made_by: JSON, all that decides the lines.
            overwrite: Replace a file that is there, and lines that something else decided.

        Raises:
            InputError: Another process writes the file, or it was begun from another text, or with
                another model or settings.
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
            with self._locked("r+b") as file:
                self._count(file, overwrite)
        self._finish()

    def _count(self, file: IO[bytes], overwrite: bool) -> None:
        """Counts what is to be continued, and cuts off a line that was not finished."""
        try:
            with undamaged(self._partial, "--overwrite begins again"):
                self._read(file)
        except InputError:
            if not overwrite:
                raise
            self.lines, self._bytes, self.counts = 0, 0, Counter()
        file.truncate(self._bytes)

    def _read(self, file: IO[bytes]) -> None:
        head = file.readline()
        if not head.endswith(b"\n"):
            return
        before, now = parsed(head), json.loads(self._head)
        for name in {**now, **before}:
            if before.get(name) != now.get(name):  # a setting that is the default is in neither
                raise InputError(
                    f"{self._partial}: was begun with another {name} ({before.get(name)}, now "
                    f"{now.get(name)}); --overwrite begins again"
                )
        self._bytes = len(head)
        for line in itertools.takewhile(lambda line: line.endswith(b"\n"), file):
            self.counts.update(parsed(line, _LINE)["counts"])
            self.lines, self._bytes = self.lines + 1, self._bytes + len(line)

    def _locked(self, mode: str) -> IO[bytes]:
        file = self._partial.open(mode)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise self._at_work() from None
        return file

    def _at_work(self) -> InputError:
        return InputError(f"{self.path}: another m4 decode is at work on it")

    def append(self, lines: Sequence[str], counts: Sequence[Mapping[str, int]]) -> None:
        """Writes the next lines, and what was counted of each. InputError: so does another job."""
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
        try:
            with self._locked("r+b" if self._bytes else "ab") as file:
                if file.seek(0, os.SEEK_END) != self._bytes:
                    raise self._at_work()
                file.write(said if self._bytes else self._head + said)
                file.flush()
                os.fsync(file.fileno())
                self._bytes = file.tell()
        except FileNotFoundError as error:
            raise self._at_work() from error
        self._finish()

    def _finish(self) -> None:
        """Makes the file once all lines are there, packed where its name ends in .gz."""
        if self.path is None or self.lines < self.whole:
            return
        with whole(self.path) as unfinished, ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(unfinished.open("wb"))
            if self.path.suffix == ".gz":
                # Without a time and a name, so that equal lines are equal files.
                packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0)
                file = cast(IO[bytes], stack.enter_context(packed))
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

    It is the file `output` for one text and one language, else `output`/STEM.xx.suffix, in the
    folders that the input has.

    Raises:
        InputError: A folder is not there, two translations would be in one file, a translation
            would be among the input, or `output` is no file.
    """
    pairs = [(text, to) for text in texts for to in targets]
    if output == STANDARD:
        if len(pairs) > 1:
            raise InputError(f"--output={output}: of one text into one language; give a folder")
        return [Output(*pairs[0], None)]
    place = Path(output)
    several = len(pairs) > 1 or Path(inputs[0]).is_dir()
    if several or place.is_dir() or output.endswith(os.sep):
        if place.exists() and not place.is_dir():
            raise InputError(f"--output={output}: of several translations it must be a folder")
        made = [Output(text, to, place / text.inside / f"{text.stem}.{to}.{suffix}")
                for text, to in pairs]  # fmt: skip
    else:
        if place.exists() and not place.is_file():
            raise InputError(f"--output={output}: no file; - is standard output")
        made = [Output(*pairs[0], place)]
    if not place.absolute().parent.is_dir():
        raise InputError(f"--output={output}: no folder {place.parent}")
    read = {Path(text.path).resolve() for text in texts}
    folders = [Path(name).resolve() for name in inputs if Path(name).is_dir()]
    taken: dict[Path, Text] = {}
    for one in made:
        assert one.path is not None
        real = one.path.resolve()
        if real in taken:
            raise InputError(
                f"--output={output}: {taken[real].shown} and {one.text.shown} would both be "
                f"{one.path.name}"
            )
        taken[real] = one.text
        if real in read or any(real.is_relative_to(folder) for folder in folders):
            raise InputError(f"--output={output}: {one.path} would be among the input")
    return made


def copy_of_standard_input(folder: Path) -> Text:
    """Copies standard input to a folder, for it is read twice."""
    path = folder / "stdin"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return Text(epath.Path(path), "standard input")
