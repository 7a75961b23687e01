"""Writing files whole or not at all, checks of paths, and JSON."""

import errno
import fcntl
import glob
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from m4.settings import InputError, check_name
from m4.storage.records import Kind, anything

_LOCK = ".unfinished"
_CHECKSUM = "checksum"
_Parsed = TypeVar("_Parsed")
# Errors of parsers. UnicodeDecodeError and JSONDecodeError are ValueErrors; RecursionError is for
# deeply nested brackets.
_DAMAGE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a file to write that becomes `path` at the end, or is removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: matplotlib and others go by it.
    unfinished = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}{path.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yields a folder to fill that becomes `folder` at the end, or is removed on failure.

    The next process that writes the same folder removes what a killed one left, which it recognises
    by a lock that ends with its process. Without `replace`, an existing folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*/{_LOCK}"):
        with suppress(BlockingIOError), _locked(path):  # a held lock: another process is filling it
            remove(path.parent)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    unfinished.mkdir()
    try:
        with _locked(unfinished / _LOCK):
            yield unfinished
            (unfinished / _LOCK).unlink()
        old = unfinished.with_suffix(".old")
        if replace and folder.exists():
            # The old folder is moved aside first, so that the name never has half a folder.
            os.replace(folder, old)
        try:
            os.replace(unfinished, folder)
        except OSError as error:
            if replace or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        remove(old)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock. Raises OSError if it is held or is a link, which may lead elsewhere."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def remove(path: Path) -> None:
    """Removes a file, a folder with its content, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Folders in which all links are followed.
_followed: set[Path] = set()


def follow_links(folder: Path = Path("/")) -> None:
    """Allows links in a folder, by default in all folders, to lead out of it."""
    _followed.add(folder.resolve())


def check_tree(folder: Path) -> None:
    """Checks that a run's folder, which may be a stranger's, has only its own files.

    Raises:
        InputError: A link leads out of it, or something there is not a file, so that reading might
            never end.
    """
    base = folder.resolve()
    followed = any(base.is_relative_to(one) for one in _followed)
    for at, folders, files in os.walk(folder):
        for path in (Path(at, name) for name in (*folders, *files)):
            if not followed and path.is_symlink() and not path.resolve().is_relative_to(base):
                said = "outside of the run's folder; it is followed with --follow_links only"
                raise InputError(f"{path}: a link to {path.readlink()}, {said}")
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise InputError(f"{path}: not a file but a pipe, a socket or a device")


def check_output(path: Path, said: str) -> None:
    """Checks that a file or folder can be written, before the work for its content.

    Raises:
        InputError: It cannot be written. The message begins with `said`.
    """
    check_name(str(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{said}: not a file but a pipe, a socket or a device")
    parent = next(one for one in path.absolute().parents if one.exists())
    probe = parent / f".m4-{uuid.uuid4().hex[:8]}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise InputError(f"{said}: cannot be written ({parent}: {error.strerror})") from error


def check_input(path: Path) -> None:
    """Raises InputError for an existing path that is not a file: reading it might never end."""
    if path.exists() and (not path.is_file() or re.match("/(proc|sys)/", str(path.resolve()))):
        what = "a folder" if path.is_dir() else "a pipe, a socket, a device or one of the system's"
        raise InputError(f"{path}: not a file but {what}")


def confined(folder: Path, name: str) -> Path:
    """Returns the file with this name, relative and with "/", in a folder.

    By such names, a run's files, which may be a stranger's, decide what is written and deleted.

    Raises:
        InputError: The file is outside of the folder.
    """
    target = folder / name
    inside = bool(name) and ".." not in PurePosixPath(name).parts and not Path(name).is_absolute()
    # A link within the folder may also lead outside.
    if not (inside and target.parent.resolve().is_relative_to(folder.resolve())):
        raise InputError(f"{folder}: a file there names {name!r}, which is outside of it")
    return target


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file, whole or not at all."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def keep_result(content: bytes, output: Path | None, place: Path) -> None:
    """Writes a result to `output`, by default to `place`, and prints the path.

    Raises:
        InputError: `output` cannot be written. If `place` cannot, a line on stderr says so.
    """
    path = output or place
    try:
        with whole(path) as unfinished:
            unfinished.write_bytes(content)
    except OSError as error:
        if output is not None:
            raise InputError(f"--output={output}: cannot be written ({error.strerror})") from error
        said = f"not written ({error.strerror}); --output=FILE names another place"
        print(f"{path}: {said}", file=sys.stderr)
    else:
        print(path)


def write_json(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Writes a JSON object with a checksum of its content, which `read_json` compares."""
    found = json.loads(json.dumps(content))  # as it will be read, with names as text
    text = json.dumps({**found, _CHECKSUM: _checksum(found)}, ensure_ascii=False, indent=indent)
    write_text(path, text + "\n")


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Writes one JSON object per line, not escaped to ASCII, as people read these files."""
    with whole(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_json(
    path: Any,  # a path of pathlib or, for a file in a bucket, of epath
    kind: Kind = anything,
    parse: Callable[[dict[str, Any]], _Parsed] = lambda found: found,
    remedy: str = "",
) -> _Parsed:
    """Returns the parsed content of a file with one JSON object, written by m4.

    Args:
        kind: Kinds of the object's values (`m4.storage.records`).
        parse: Function that converts the object. Defaults to the object itself.
        remedy: Advice on a damaged file, for the message.

    Raises:
        InputError: The file is damaged: not JSON, not an object, a wrong checksum, a value of
            another kind, or one that `parse` rejects.
        FileNotFoundError: The file does not exist.
    """
    content = path.read_bytes()
    with undamaged(path, remedy):
        found = parsed(content)
        # Only `write_json` writes a checksum.
        if (checksum := found.pop(_CHECKSUM, None)) and checksum != _checksum(found):
            raise ValueError("its content is not what was written")
        kind(found, "")
        return parse(found)


def read_jsonl(path: Any, kind: Kind = anything, *, cut_off: bool = False) -> list[dict[str, Any]]:
    """Returns the lines of a plain or .gz file, each a JSON object of the kind.

    Args:
        cut_off: Whether to leave out a last line without its end, from a killed job.

    Raises:
        InputError: A line is damaged; the message has file, line and fault.
        FileNotFoundError: The file does not exist.
    """
    content = path.read_bytes()
    if str(path).endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path}: damaged ({error})") from error
    rows = []
    for number, line in enumerate(io.BytesIO(content), 1):
        if not cut_off or line.endswith(b"\n"):
            with undamaged(f"{path} line {number}"):
                rows.append(parsed(line, kind))
    return rows


@contextmanager
def undamaged(where: object, remedy: str = "") -> Iterator[None]:
    """Turns errors of parsers into an InputError: "run.json: damaged (...)"."""
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        more = f"; {remedy}" if remedy else ""
        raise InputError(f"{where}: damaged ({said}){more}") from error


def parsed(content: bytes, kind: Kind = anything) -> dict[str, Any]:
    """Returns one JSON object. Raises ValueError or TypeError with the fault and its place."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TypeError(f"not a JSON object but {type(found).__name__}")
    kind(found, "")
    return found
