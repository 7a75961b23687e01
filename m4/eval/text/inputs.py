"""Which files are translated, into what, and where the translations go."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from etils import epath

from m4.data.sources.reading import files
from m4.data.sources.reading.lines import BOM
from m4.settings import InputError

STANDARD = "-"
# The same by another name.
_STANDARD = {
    "--input": ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"),
    "--output": ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"),
}
# A longer line is no text; lines of a book without line ends are shorter.
_MOST_LINE_BYTES = 1 << 26


class Text(NamedTuple):
    """A file of lines: UTF-8, as it is or packed as .gz or .zst.

    shown: its name in messages. inside: the folders between the folder that was asked for and it.
    """

    path: epath.Path
    shown: str
    inside: str = ""

    @property
    def stem(self) -> str:
        """Its name without .gz, .zst and .txt: of translations it is STEM.xx.txt."""
        return files.unpacked_name(self.path).removesuffix(".txt")

    def lines(self) -> Iterator[str]:
        """Its lines without their ends.

        Raises:
            InputError: a line that is not UTF-8, or beyond 64 MiB; file and line.
        """
        for number, line in enumerate(files.lines(self.path, _MOST_LINE_BYTES), 1):
            if len(line) > _MOST_LINE_BYTES:
                raise InputError(f"{self.shown} line {number}: longer than 64 MiB")
            try:
                text = line.removeprefix(BOM if number == 1 else b"").decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{self.shown} line {number}: not UTF-8 ({error})") from error
            yield text.removesuffix("\r")

    def checked(self) -> tuple[int, str]:
        """How many lines it has, all of which can be read, and the SHA-256 of them."""
        count, digest = 0, hashlib.sha256()
        for line in self.lines():
            digest.update(line.encode() + b"\n")
            count += 1
        return count, digest.hexdigest()


@dataclass(frozen=True)
class Wanted:
    """A text, the language that it is translated into, and the file; None: standard output."""

    text: Text
    to: str
    output: Path | None


def standard(option: str, name: str) -> str:
    """The name that was given to --input or --output, or STANDARD where it is that stream's."""
    return STANDARD if name in _STANDARD[option] else name


def texts_of(inputs: Sequence[str]) -> list[Text]:
    """The files of --input: each, and of a folder all that are not hidden, by name.

    Raises:
        InputError: one that is not there or cannot be read; a folder without files, or with a link
            to nothing or to a folder that it is in.
    """
    return [text for one in inputs for text in _texts_of(one)]


def _texts_of(name: str) -> Iterator[Text]:
    path = epath.Path(name)
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"--input={name}: no such file")
        if os.path.exists(name) and not os.path.isfile(name):  # a pipe
            raise InputError(
                f"--input={name}: can be read only once; give a file, or - for standard input"
            )
        yield Text(path, name)
        return
    files_there = [*_files_in(path, "", (os.path.realpath(name),))]
    if not files_there:
        raise InputError(f"--input={name}: no files in this folder")
    yield from files_there


def _files_in(folder: epath.Path, inside: str, above: tuple[str, ...]) -> Iterator[Text]:
    """above: the folder and those that it is in, without links."""
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


def wanted(
    inputs: Sequence[str],
    texts: Sequence[Text],
    targets: Sequence[str],
    output: str,
    suffix: str = "txt",
) -> list[Wanted]:
    """Every text into every target: FILE of one text into one language, else FOLDER/STEM.xx.suffix,
    in the folders that the input has.

    Raises:
        InputError: a folder that is not there; two translations in one file; a file of the input;
            what is no file.
    """
    if output == STANDARD:
        if len(texts) * len(targets) > 1:
            raise InputError(f"--output={output}: of one text into one language; give a folder")
        return [Wanted(texts[0], targets[0], None)]
    place = Path(output)
    a_file = len(texts) * len(targets) == 1 and not Path(inputs[0]).is_dir()
    if a_file and not place.is_dir() and not output.endswith(os.sep):
        if place.exists() and not place.is_file():
            raise InputError(f"--output={output}: no file; - is standard output")
        made = [Wanted(texts[0], targets[0], place)]
    else:
        if place.exists() and not place.is_dir():
            raise InputError(f"--output={output}: of several translations it must be a folder")
        made = [
            Wanted(text, to, place / text.inside / f"{text.stem}.{to}.{suffix}")
            for text in texts
            for to in targets
        ]
    if not place.absolute().parent.is_dir():
        raise InputError(f"--output={output}: no folder {place.parent}")
    _check(inputs, made, output)
    return made


def _check(inputs: Sequence[str], made: Sequence[Wanted], output: str) -> None:
    sources: dict[Path, Text] = {}
    read = {Path(one.text.path).resolve() for one in made}
    folders = [Path(name).resolve() for name in inputs if Path(name).is_dir()]
    for one in made:
        assert one.output is not None
        place = one.output.resolve()
        if place in sources:
            raise InputError(
                f"--output={output}: {sources[place].shown} and {one.text.shown} would both be "
                f"{one.output.name}"
            )
        sources[place] = one.text
        if place in read or any(place.is_relative_to(folder) for folder in folders):
            raise InputError(f"--output={output}: {one.output} would be among the input")
