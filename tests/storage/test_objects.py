"""Requests to a bucket, by obstore over loopback (`tests.bucket`)."""

from pathlib import Path

import pytest

from m4.settings import InputError
from m4.storage.objects import Changed, Objects, Unreachable, check_place
from tests.bucket import ACCOUNT, Emulator
from tests.storage.conftest import Patch, folder_of


def test_an_object_is_written_only_over_the_version_that_is_known(address: str) -> None:
    objects = Objects(address)
    first = objects.put_if("a/b", b"1", None)
    with pytest.raises(Changed):
        objects.put_if("a/b", b"2", None)
    second = objects.put_if("a/b", b"2", first)
    with pytest.raises(Changed):
        objects.put_if("a/b", b"3", first)
    assert objects.get_version("a/b") == (b"2", second)


def test_files_are_listed_downloaded_and_removed(
    address: str, emulator: Emulator, tmp_path: Path
) -> None:
    objects, large = Objects(address), tmp_path / "large"
    large.write_bytes(bytes(range(256)) * (1 << 17))  # 32 MiB: more than one request's part
    objects.put("a/large", large)
    objects.put("empty", b"")
    emulator.write(f"{folder_of(address)}/", b"")
    emulator.write(f"{folder_of(address)}/a/", b"")
    assert {name: found.size for name, found in objects.list().items()} == {
        "a/large": 1 << 25,
        "empty": 0,
    }
    assert objects.download("a/large", tmp_path / "again") == objects.list()["a/large"].version
    assert (tmp_path / "again").read_bytes() == large.read_bytes()
    assert b"".join(objects.pieces("a/large")) == large.read_bytes()
    objects.delete("a/large", "a/large", "never there")
    assert objects.get_version("a/large") is None
    with pytest.raises(FileNotFoundError):
        objects.download("a/large", tmp_path / "again")


def test_503s_and_cut_connections_are_retried(
    address: str, emulator: Emulator, tmp_path: Path
) -> None:
    objects = Objects(address)
    emulator.fail(r"PUT /.*once", 2)
    emulator.fail(r"PUT /.*cut", 1, cut=True)
    emulator.fail(r"GET /.*cut", 1, cut=True)
    objects.put("once", b"1")
    objects.put("cut", b"12345678")
    objects.download("cut", tmp_path / "cut")
    assert (tmp_path / "cut").read_bytes() == b"12345678"
    assert len(emulator.failed) == 4


@pytest.mark.parametrize("lacking", ["list", "get", "create", "delete"])
def test_a_right_that_is_lacking_is_one_line(
    address: str, emulator: Emulator, lacking: str
) -> None:
    objects = Objects(address)
    objects.put("there", b"")
    emulator.rights.remove(f"storage.objects.{lacking}")
    with pytest.raises(InputError) as error:
        {
            "list": objects.list,
            "get": lambda: objects.get_version("there"),
            "create": lambda: objects.put("new", b""),
            "delete": lambda: objects.delete("there"),
        }[lacking]()
    said = f"{address}: {ACCOUNT} lacks storage.objects.{lacking}: grant it roles/storage.object"
    assert str(error.value).startswith(said)
    assert "new" not in emulator.names(folder_of(address))


def test_a_bucket_that_is_not_there_or_not_reached_is_one_line(
    emulator: Emulator, monkeypatch: Patch
) -> None:
    for use in (lambda one: one.list(), lambda one: one.put("a", b"")):
        with pytest.raises(
            InputError, match=r"gs://missing/run: no bucket missing: .*create gs://"
        ):
            use(Objects("gs://missing/run"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr("m4.storage.objects._RETRY_SECONDS", 0.1)
    with pytest.raises(Unreachable, match=r"^gs://missing/run: cannot be reached \(.*\)$"):
        Objects("gs://missing/run").list()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("gs:/bucket/run", "an address begins with gs://"),
        ("gs://", "no bucket is named; gs://BUCKET/FOLDER"),
        ("s3://bucket/run", "s3:// is not supported; give a folder, or gs://"),
    ],
)
def test_an_address_that_is_none_is_one_line(wrong: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        check_place(wrong)
    assert str(error.value) == f"{wrong}: {said}"
