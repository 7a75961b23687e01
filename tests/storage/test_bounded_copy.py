"""A corpus in a bucket: larger than this machine's room for it, and prepared there in shards."""

import contextlib
from pathlib import Path

import pytest

from m4.data.cache import shards
from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.stream.stream import Stream
from m4.jobs import corpus
from m4.settings import InputError
from m4.storage.local_copy import BoundedCopy, finished_folder, local_place
from m4.storage.objects import Objects
from tests.bucket import Emulator
from tests.command_line import contents
from tests.data.arrays import same
from tests.data.corpora import WRITERS, texts_of
from tests.data.corpus import Made
from tests.data.test_beam import Shuffled, spec
from tests.storage.conftest import Machine


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 4000)


@pytest.fixture
def built(address: str, small_shards: None, machine: Machine) -> Cache:
    """Builds a corpus of some 40 shards in the bucket, with nothing on this machine."""
    spec = CorpusSpec(Made({"gl": 900, "pt": 900}), vocabulary_size=400, workers=1)
    made = Cache(local_place(address) / corpus.build_corpus(spec, address))
    machine()
    return made


def opened(address: str, built: Cache, gigabytes: float) -> Cache:
    """Opens the corpus as `open_corpus` does."""
    files = built.manifest["files"]
    folder = finished_folder(address, built.fingerprint, lambda n: not corpus.is_shard(n))
    assert folder is not None
    cache = Cache(folder)
    cache.bounded = BoundedCopy(
        f"{address}/{built.fingerprint}",
        folder,
        {name: one for name, one in files.items() if corpus.is_shard(name)},
        gigabytes,
    )
    return cache


def shards_here(cache: Cache) -> list[Path]:
    assert cache.bounded is not None
    return [*cache.bounded.here.glob("train.*.npy")]


def end(cache: Cache) -> None:
    """Releases what a process holds until it ends."""
    assert cache.bounded is not None
    cache.bounded.held.close()


def bytes_here(cache: Cache) -> int:
    found = 0
    for path in shards_here(cache):
        with contextlib.suppress(FileNotFoundError):  # another thread makes room
            found += path.stat().st_size
    return found


# A window of 64 pairs is read to its end before the next one: few shards at a time.
OPTIONS = {"batch_rows": 16, "layout": "single", "window": 64, "seed": 3}


def test_batches_are_those_of_a_local_corpus_within_the_room(address: str, built: Cache) -> None:
    files = built.manifest["files"].items()
    room = sum(size for name, (size, _) in files if corpus.is_shard(name)) * 2 // 3
    remote, local = opened(address, built, room / 1e9), Cache(built.folder)
    assert bytes_here(remote) == 0
    wanted, found = Stream(local, **OPTIONS), Stream(remote, **OPTIONS)
    most, fetched = 0, set()
    for step in range(240):  # more than an epoch of the four directions
        assert same(found.batch(step), wanted.batch(step))
        most = max(most, bytes_here(remote))
        fetched |= {path.name for path in shards_here(remote)}
    assert 0 < most <= room
    tokens = {name for name in built.manifest["files"] if name.startswith("train.tokens.")}
    assert fetched >= tokens, "all of them, one after another"


def test_what_is_here_is_not_fetched_again(address: str, built: Cache) -> None:
    first = opened(address, built, 1.0)
    Stream(first, **OPTIONS).batch(0)
    before = {path: path.stat().st_mtime_ns for path in shards_here(first)}
    end(first)
    assert 0 < len(before) < len([*built.folder.glob("train.*.npy")])
    Stream(opened(address, built, 1.0), **OPTIONS).batch(0)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_smaller_room_is_made_at_once(address: str, built: Cache) -> None:
    Stream(first := opened(address, built, 1.0), **OPTIONS).batch(100)
    here = bytes_here(first)
    end(first)
    second = opened(address, built, here / 2e9)
    assert 0 < bytes_here(second) <= here / 2


def test_two_jobs_of_a_machine_leave_each_other_their_shards(address: str, built: Cache) -> None:
    files = built.manifest["files"].items()
    room = sum(size for name, (size, _) in files if corpus.is_shard(name)) * 2 // 3
    jobs = [opened(address, built, room / 1e9) for _ in range(2)]
    wanted = Stream(Cache(built.folder), **OPTIONS)
    one, other = (Stream(job, **OPTIONS) for job in jobs)
    # Another one, which needs all files, has some of them already.
    own = jobs[0].folder / min(filter(corpus.is_shard, built.manifest["files"]))
    own.write_bytes((built.folder / own.name).read_bytes())
    for step in range(80):  # half an epoch apart: what one needs the other does not
        assert same(one.batch(step), wanted.batch(step))
        assert same(other.batch(step + 120), wanted.batch(step + 120))
    assert own.is_file()
    assert own.name not in {path.name for job in jobs for path in shards_here(job)}


def test_mistakes_are_one_line(address: str, built: Cache) -> None:
    with pytest.raises(
        InputError,
        match=r"^Data\.disk_gigabytes = 5e-06: a few steps need [\d.e-]+ GB of gs://\S+ at once$",
    ):
        Stream(opened(address, built, 5e-6), **OPTIONS).batch(0)
    Stream(whole := opened(address, built, 1.0), **OPTIONS).batch(0)
    path = min(path for path in shards_here(whole) if ".tokens." in path.name)
    path.unlink()
    end(whole)
    name = path.name
    objects = Objects(f"{address}/{built.fingerprint}")
    content = b"".join(objects.pieces(name))
    objects.delete(name)
    with pytest.raises(InputError, match=rf"^{address}/{built.fingerprint}/{name}: missing"):
        Stream(opened(address, built, 1.0), **OPTIONS).batch(0)
    objects.put(name, content[:-1] + b"x")
    with pytest.raises(InputError, match=rf"{name}: damaged: its content is not what was written"):
        Stream(opened(address, built, 1.0), **OPTIONS).batch(0)


def test_shards_in_a_bucket(tmp_path: Path, address: str, emulator: Emulator) -> None:
    texts = texts_of(Made({"gl": 30, "pt": 20}, held_out=4))
    texts["gl"]["train"] += texts["gl"]["train"][:9]  # duplicates
    source = WRITERS["tsv"](tmp_path / "text", texts)
    work = Shuffled("direct", [], 1)
    folder = address.split("/", 3)[3]
    with work.opened(address):
        many, one = (
            spec(lambda: source).build(tmp_path / name, engine=engine)
            for name, engine in (("many", work), ("one", None))
        )
        assert {".running/beam.json", "started"} < emulator.names(folder)
    assert one.ledger().total("train").dropped == {"duplicates: exact pair": 9}
    assert contents(many.folder) == contents(one.folder)
    assert not emulator.names(folder)
    emulator.rights.remove("storage.objects.create")
    with pytest.raises(InputError, match=r" lacks storage\.objects\.create: grant it"):
        work.open(address)
