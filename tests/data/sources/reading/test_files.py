import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from etils import epath
from etils.epath import backend, gpath
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from m4.data.sources.reading import files
from m4.eval.text import Text
from m4.settings import InputError
from tests.data.corpora import PACK, WRITERS, arguments_of, texts_of
from tests.data.corpus import Made


def test_lines_are_those_of_python_and_no_longer_than_asked_for(tmp_path: Path) -> None:
    # More than one chunk of 1 MiB, an empty line, one across the chunks' border, no end.
    content = b"a\n\n" + b"b" * ((1 << 20) - 5) + b"border\n" + b"c\n" * 9 + b"end"
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    assert list(files.lines(epath.Path(path), 1 << 21)) == content.split(b"\n")
    short = [line[:11] for line in content.split(b"\n")]
    assert list(files.lines(epath.Path(path), 10)) == short
    path.write_bytes(b"a\n")
    assert list(files.lines(epath.Path(path), 10)) == [b"a"]
    path.write_bytes(b"")
    assert list(files.lines(epath.Path(path), 10)) == []


@pytest.mark.parametrize("ending", files.COMPRESSED)
def test_packed_files_of_several_parts(tmp_path: Path, ending: str) -> None:
    parts = [b"first\n" * 100_000, b"second\n", b"third"]
    pack = PACK[ending]
    path = epath.Path(tmp_path / f"x{ending}")
    path.write_bytes(b"".join(map(pack, parts)))
    assert b"".join(files.chunks(path)) == b"".join(parts)
    assert files.unpacked(path.name) == "x"


@pytest.mark.parametrize("ending", files.COMPRESSED)
@pytest.mark.parametrize("damage", ["cut off", "garbage"])
def test_damaged_packed_files_are_one_clear_line(tmp_path: Path, ending: str, damage: str) -> None:
    pack = PACK[ending]
    path = epath.Path(tmp_path / f"x{ending}")
    path.write_bytes(pack(b"text\n" * 100_000)[:-9] if damage == "cut off" else b"garbage" * 99)
    with pytest.raises(ValueError, match=rf"x\{ending}: damaged, it cannot be unpacked") as error:
        list(files.chunks(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ending", [".zip", ".7z", ".tar", ".tar.gz", ".tgz", ".tar.zst", ".Z"])
def test_archives_are_named(tmp_path: Path, ending: str) -> None:
    """Also where the compression is read: a tar file inside is no text."""
    path = tmp_path / f"text{ending}"
    path.write_bytes(gzip.compress(b"a line\n"))
    with pytest.raises(InputError, match=rf"text{ending}: cannot be unpacked here; unpack it"):
        Text(epath.Path(path), str(path)).checked()


def test_a_line_is_never_whole_in_memory(tmp_path: Path) -> None:
    """100 MB without a line end, packed in a few kB."""
    path = epath.Path(tmp_path / "x.gz")
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b"\nshort\n")
    assert list(files.lines(path, 1000)) == [b"x" * 1001, b"short"]


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the files whose hashes are computed; the machine's cache is tmp_path/cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: list[str] = []
    real = files.hashlib.sha256

    def spy(content: bytes | None = None) -> Any:
        names.extend(["one"] * (content is None))
        return real(content or b"")

    monkeypatch.setattr(files.hashlib, "sha256", spy)
    return names


def test_hashes_are_remembered_until_the_file_changes(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # ctime cannot be set back: instead the clock is put forward.
    monkeypatch.setattr(files.time, "time", lambda: os.stat(tmp_path / "a").st_ctime + 100)
    (tmp_path / "a").write_text("text")
    path = epath.Path(tmp_path / "a")
    # sha256sum of the four letters.
    sha256 = "982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1"
    assert [files.digest(path) for _ in range(3)] == [[4, sha256]] * 3
    assert len(hashed) == 1
    (tmp_path / "a").write_text("tex!")  # as long as before
    assert files.digest(path)[1] != sha256
    assert len(hashed) == 2
    os.utime(path, (1, 1))  # another time: read again, the same content
    known = files.digest(path)
    assert len(hashed) == 3
    (memory,) = (tmp_path / "cache").rglob("*.json")
    for damage in ("{", "[]", "3", "{}"):
        memory.write_text(damage)
        assert files.digest(path) == known
    assert len(hashed) == 7


def test_a_file_in_place_of_one_as_old_and_as_large_is_read(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time was set back, as cp --preserve does; when it was put there cannot be."""
    path = tmp_path / "a"
    monkeypatch.setattr(files.time, "time", lambda: os.stat(path).st_ctime + 100)
    known = []
    for text in ("text", "tex!"):
        path.write_text(text)
        os.utime(path, (1, 1))
        known.append(files.digest(epath.Path(path)))
    assert known[0] != known[1]
    assert len(hashed) == 2


def test_a_file_that_was_just_written_is_not_trusted(tmp_path: Path, hashed: list[str]) -> None:
    (tmp_path / "a").write_text("text")
    for _ in range(2):
        files.digest(epath.Path(tmp_path / "a"))
    assert len(hashed) == 2


class Bucket(MemoryFileSystem):
    """Stand-in for gs:// in this process's memory."""

    protocol = ("gs", "gcs")
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("gs://").removeprefix("gcs://").strip("/")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[epath.Path]:
    """Yields a remote folder of fsspec."""
    monkeypatch.setenv("EPATH_USE_TF", "false")
    monkeypatch.setattr(files, "check_readable", lambda address: None)  # Google's own client
    fsspec.register_implementation("gcs", Bucket, clobber=True)
    # epath asks once a process; here nothing is to be left of the answers.
    answers = (gpath._is_tf_installed, backend.fsspec_backend._get_filesystem)
    for answer in answers:
        answer.cache_clear()
    yield epath.Path("gs://bucket/corpus")
    for answer in answers:
        answer.cache_clear()
    _registry.pop("gcs")


@pytest.mark.parametrize("name", sorted(set(WRITERS) - {"tfds"}))
def test_a_remote_corpus_is_the_local_one(name: str, tmp_path: Path, bucket: epath.Path) -> None:
    texts = texts_of(Made({"gl": 20, "pt": 20}, held_out=8))
    local = WRITERS[name](tmp_path, texts)
    Bucket().put(f"{tmp_path}/", f"{bucket}/{name}", recursive=True)
    remote = type(local)(**arguments_of(name, bucket / name))  # type: ignore
    assert texts_of(remote) == texts_of(local)
    assert remote.identity() == local.identity()


def test_a_remote_folder_that_cannot_be_read_is_one_clear_line(
    bucket: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"B\.folder = 'gs://bucket/missing': must be a folder"):
        files.folder_at("gs://bucket/missing", "B.folder")
    with pytest.raises(ValueError, match=r"B\.folder = 's3://b/c': must be a folder that can be"):
        files.folder_at("s3://b/c", "B.folder")
    monkeypatch.delenv("EPATH_USE_TF")
    with pytest.raises(ValueError, match=r"s3:// needs EPATH_USE_TF=false"):
        files.folder_at("s3://b/c", "B.folder")
