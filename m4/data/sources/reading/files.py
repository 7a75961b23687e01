"""Reading of corpus files, local or remote, compressed or not, and hashes of their contents.

Paths are those of etils.epath: a folder on disk, or gs://, s3:// and the like. Files named .gz,
.zst, .xz or .bz2 are unpacked while reading. Nothing here holds a whole file in memory.
"""

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import zstandard
from etils import epath

from m4.parallel.platform.hardware import cache_folder
from m4.settings import InputError, SettingError
from m4.storage.files import check_input, write_text
from m4.storage.objects import check_readable

_NOT_READABLE = (errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP)
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
# Archives and other compressions, which are not text even if they can be decoded.
_ARCHIVE = re.compile(r"\.(zip|7z|rar|tar|tgz|tbz2?|txz|Z|lz4?|br|lzma)(\.\w+)?$")
_CHUNK_BYTES = 1 << 20
_MOST_FILES = 200_000  # maximum number of files in a folder that is searched
# Size of pieces of a .zst file, each of which may unpack to 32,768 times its size.
_ZST_PIECE_BYTES = 1 << 13
# A file may change twice within one tick of its clock; remote clocks have ticks of a second.
_TICK_SECONDS = 2.0


def folder_at(folder: str | os.PathLike[str], setting: str) -> epath.Path:
    """Returns the folder that a setting names. Raises SettingError if it cannot be read."""
    path = epath.Path(folder)
    scheme, _, rest = os.fspath(path).partition("://")
    by_tensorflow = os.environ.get("EPATH_USE_TF", "").lower() not in ("false", "no", "f", "0")
    if rest and scheme != "gs" and by_tensorflow:  # epath prefers TensorFlow, which only has gs://
        needs = "EPATH_USE_TF=false in the environment, and the package that fsspec needs for it"
        allowed = f"a folder that can be read: {scheme}:// needs {needs}"
        raise SettingError(setting, os.fspath(folder), allowed)
    if rest and scheme == "gs" and not by_tensorflow:
        check_readable(os.fspath(path))  # gcsfs reports a folder without read access as missing
    try:
        there = path.is_dir()
    except ImportError as error:  # a remote file system whose package is not installed
        allowed = f"a folder that can be read: {error}"
        raise SettingError(setting, os.fspath(folder), allowed) from error
    if not there:
        raise SettingError(setting, os.fspath(folder), "a folder that exists")
    return path


def names_below(
    folder: epath.Path, depth: int, before: str = ""
) -> Iterator[tuple[str, epath.Path]]:
    """Yields the names and paths of the files below a folder, without hidden ones.

    At the last depth, folders may be among the files, as each check is a request in a bucket.
    """
    for path in sorted(folder.iterdir())[:_MOST_FILES]:
        if path.name.startswith("."):
            continue
        if depth == 1 or not path.is_dir():
            yield f"{before}{path.name}", path
        else:
            yield from names_below(path, depth - 1, f"{before}{path.name}/")


def unpacked(name: str) -> str:
    """Returns a file's name or path without .gz, .zst, .xz or .bz2."""
    return name.removesuffix(packing(name))


def packing(name: object) -> str:
    """Returns the ending of a name that says how the file is compressed, or ''."""
    return next((end for end in COMPRESSED if str(name).endswith(end)), "")


@contextmanager
def _opened(path: epath.Path) -> Iterator[Any]:
    """Opens a file. Raises InputError for a folder, an archive, or an unreadable file."""
    if _ARCHIVE.search(path.name):
        read = f"plain files and {', '.join(COMPRESSED)} are read"
        raise InputError(f"{path}: cannot be unpacked here; unpack it first ({read})")
    if "://" not in os.fspath(path):
        check_input(Path(path))
    with _readable(path):
        opened = path.open("rb")
    with opened as file:
        yield file


@contextmanager
def _readable(path: epath.Path) -> Iterator[None]:
    """Raises InputError for a folder, a broken link, or an unreadable file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_READABLE:
            raise
        lost = error.errno == errno.ELOOP or (error.errno == errno.ENOENT and os.path.islink(path))
        link = "a broken link, " if lost else ""
        raise InputError(f"{path}: cannot be read: {link}{error.strerror}") from error


def chunks(path: epath.Path) -> Iterator[bytes]:
    """Yields the file's contents, unpacked. Raises InputError if it is damaged or cut off."""
    end = packing(path.name)
    opened = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    with _opened(path) as file:
        try:
            if end in opened:
                with opened[end](file) as unpacked:
                    yield from _pieces(unpacked, _CHUNK_BYTES)
            elif end == ".zst":
                yield from _unzstd(file)
            else:
                yield from _pieces(file, _CHUNK_BYTES)
        except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError) as error:
            # gzip and bz2 raise an OSError without a number for damaged content.
            if isinstance(error, OSError) and (error.errno is not None or not end):
                raise
            raise InputError(f"{path}: damaged, it cannot be unpacked: {error}") from error


def _pieces(file: Any, size: int) -> Iterator[bytes]:
    while piece := file.read(size):
        yield piece


def _unzstd(file: Any) -> Iterator[bytes]:
    # Not zstandard's stream_reader, which ignores that a file is cut off.
    frame = None
    for piece in _pieces(file, _ZST_PIECE_BYTES):
        while piece:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if unpacked := frame.decompress(piece):
                yield unpacked
            piece = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle")


def lines(path: epath.Path, most_bytes: int) -> Iterator[bytes]:
    """Yields the lines without line feeds.

    Of a line with more than `most_bytes` bytes, only the first `most_bytes` + 1 are yielded.
    """
    line = b""
    for chunk in chunks(path):
        first, *others = chunk.split(b"\n")
        line = (line + first)[: most_bytes + 1]
        for other in others:
            yield line
            line = other[: most_bytes + 1]
    if line:
        yield line


@contextmanager
def seekable(path: epath.Path) -> Iterator[IO[bytes]]:
    """Opens a file as a Python binary file, for libraries that seek in it."""
    with _opened(path) as file:
        if isinstance(file, io.IOBase):
            yield file  # type: ignore
            return
        with tempfile.TemporaryFile() as copy:  # TensorFlow's files have only read, seek and tell
            shutil.copyfileobj(file, copy, _CHUNK_BYTES)
            copy.seek(0)
            yield copy


def digest(path: epath.Path) -> list:
    """Returns [size in bytes, SHA-256] of the stored file.

    If size and times of change are the same (to the nanosecond, for remote files to the second),
    the hash comes from this machine's cache.
    """
    (stamp, changed), now = _stamp(path), time.time()
    name = os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)
    key = hashlib.sha256(name.encode()).hexdigest()
    known = cache_folder() / "hashes" / f"{key}.json"
    try:
        remembered = json.loads(known.read_text(encoding="utf-8"))
        if changed and remembered["stamp"] == stamp:
            return [stamp[0], remembered["sha256"]]
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        pass  # there is none, or it is damaged
    hashed = hashlib.sha256()
    with _opened(path) as file:
        for piece in _pieces(file, _CHUNK_BYTES):
            hashed.update(piece)
    if _stamp(path)[0] != stamp:
        raise InputError(f"{path}: was changed while it was read; start again")
    # Soon after a change, another one might leave the same stamp.
    if changed and now - changed >= _TICK_SECONDS:
        write_text(known, json.dumps({"stamp": stamp, "sha256": hashed.hexdigest()}))
    return [stamp[0], hashed.hexdigest()]


def _stamp(path: epath.Path) -> tuple[list[int], float]:
    """Returns [size, times of change], and the last time in seconds (0 if there is none)."""
    name = os.fspath(path)
    if "://" in name:
        remote = path.stat()
        return [remote.length, remote.mtime], float(remote.mtime)
    # ctime too: cp --preserve and the like set mtime, nothing sets ctime.
    with _readable(path):
        local = os.stat(name)
    times = [local.st_mtime_ns, local.st_ctime_ns]
    return [local.st_size, *times], max(times) / 1e9
