"""Prepares a corpus on Apache Beam, with the same stages as on one machine and any Beam runner.

Beam runs in an environment of its own (`make beam`), without JAX and TensorFlow. `Engine` writes a
job into a folder that all workers see, runs `program` in that environment, and builds the corpus
from the shards that workers write. A shard is named by the hash of its inputs, so that an existing
shard is not made again.

A file's text passes through the stages up to a barrier, a stage that must know the other files too.
There the keys of pairs are compared, or counts are added, and the next segment of stages begins.
Pairs are numbered by file and line, and of equal pairs the first one is kept, in whatever order
workers finish. At the end the keys of sentences are compared, so that equal ones of a language get
one number. Text and keys, 12 bytes per pair or sentence, are in files; Beam carries only their
names and counts. The text of a segment is removed when that of the next one exists.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from m4.data.arrays import U32, Array, Ints, Mask
from m4.data.cache.corpus_text import FILE, Progress, Recorded, place_of
from m4.data.cleaning import AnyCheck, Check, FirstCheck, FittedCheck, HeldOut
from m4.data.cleaning.chunk import PAIRS, Chunk, check_sentences
from m4.data.cleaning.clean import Cleaner, Cleaning, Part, alone, sentence_lines
from m4.data.cleaning.ledger import Count
from m4.data.directions import ROLES, SIDES, split_direction
from m4.data.permutation import mix
from m4.data.sources import Pair, Shard, Source, gives_ids, shards_of
from m4.data.sources.reading.files import digest, lines, packing
from m4.data.sources.reading.lines import MAX_LINE_BYTES, Reading, Tally
from m4.data.vocabulary import Ragged, vocabulary
from m4.data.vocabulary.tokenizing import RangeTokenizer, TextRange, TokenArray, Tokenized, id_type
from m4.parallel.platform.hardware import code_digest
from m4.parallel.platform.signals import end_with
from m4.settings import InputError, SettingError, import_module
from m4.storage.files import remove, whole
from m4.storage.locks import LOST_STATUS, PERIOD_SECONDS, BucketLock, local_lock
from m4.storage.objects import ERRORS, Objects, is_address

if TYPE_CHECKING:
    from m4.data.corpus import CorpusSpec

TEXT = "training text"  # name of the stage, for `Progress`
_BUCKET_BYTES = 1 << 30  # bytes of text whose keys one worker sorts in memory
_SPANS = 64  # maximum number of ranges of text in a shard of tokens
# Tries of a pipeline that loses a worker. Runners on many machines repeat bundles themselves.
_TRIES = 3
_POLL_SECONDS = 1.0
# Sample of a corpus that `cost` reads.
_SAMPLED_LANGUAGES, _SAMPLED_PAIRS = 20, 2000
KEY = np.dtype([("key", "<u8"), ("number", "<u4")])  # hash of a pair, and its number in its shard
# A repeated pair or sentence: its number, and the shard and number of the first one like it.
_AGAIN = np.dtype([("number", "<u4"), ("shard", "<u4"), ("first", "<u4")])
_TEXT = (*SIDES, "numbers")  # files of a shard: its sentences, a line each, and its pairs' numbers
_PROGRAM = "import sys; from m4.data import beam; beam.program(int(sys.argv[1]), *sys.argv[2:])"
_FLOW = {"m4.data.sources.seqio_tasks", "m4.data.sources.tfds"}  # modules that need TensorFlow
_LOST = "Channel closed prematurely"  # Beam's message when it loses a worker
_TURN = threading.Lock()  # held by the thread that runs a step of a job in a worker
Fact = tuple[Any, ...]  # an input of a segment, from the segment before
Made = tuple[str, Any]  # a result of a segment: (name of an output, element)


class WorkersFailed(InputError):
    """The error of a pipeline that failed although no input is known to be wrong."""

    status = 1


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def as_json(value: Any, setting: str) -> Any:
    """Returns a setting as JSON, with classes and functions by name, for `from_json`.

    Raises:
        SettingError: A part of the setting cannot be made again from a name and settings.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [as_json(one, setting) for one in value]
    if isinstance(value, Mapping):
        made, args, given = dict, [[*value.items()]], {}
    elif isinstance(value, functools.partial):
        made, args, given = functools.partial, [value.func, *value.args], value.keywords
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        made, args, given = type(value), [], {name: getattr(value, name) for name in fields}
    else:
        return {"name": _name(value, setting)}
    given = {key: as_json(one, setting) for key, one in given.items()}
    return {"name": _name(made, setting), "args": as_json(args, setting), "given": given}


def _described(source: Source, cleaning: Cleaning) -> dict[str, Any]:
    given = {"source": source, "cleaning": cleaning}
    return {name: as_json(one, f"CorpusSpec.{name}") for name, one in given.items()}


def from_json(value: Any) -> Any:
    """Returns the value that `as_json` described."""
    if isinstance(value, list):
        return tuple(map(from_json, value))
    if not isinstance(value, dict):
        return value
    module, _, name = value["name"].partition(":")
    found: Any = functools.reduce(getattr, name.split("."), import_module(module))
    if "given" not in value:
        return found
    given = {key: from_json(one) for key, one in value["given"].items()}
    return found(*from_json(value["args"]), **given)


def _modules(value: Any) -> Iterator[str]:
    """Yields the modules of all names in a result of `as_json`."""
    if isinstance(value, dict):
        yield value["name"].partition(":")[0]
        value = [*value.get("args", ()), *value.get("given", {}).values()]
    for one in value if isinstance(value, list) else ():
        yield from _modules(one)


def _code(*described: Any) -> dict[str, str]:
    """Returns the digest or version of each package that decides shards, users' included."""
    code = {"m4": code_digest(), "Python": "{}.{}".format(*sys.version_info)}
    code["sentencepiece"] = importlib.metadata.version("sentencepiece")
    tops = {name.partition(".")[0] for name in _modules([*described])}
    for name in sorted(tops - {"m4", *sys.stdlib_module_names}):
        try:
            module = import_module(name)
        except ImportError as error:
            raise InputError(f"a worker lacks {name}: install it there ({error})") from error
        if folders := [*getattr(module, "__path__", ())]:
            code[name] = code_digest(Path(folders[0]))
        else:
            code[name] = hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
    return code


def _name(value: Any, setting: str) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    if "<" in name or module in (None, "__main__"):
        allowed = "a dataclass or a function that workers can import (or --runner=local)"
        raise SettingError(setting, value, allowed)
    return f"{module}:{name}"


class Work:
    """Files of jobs in a folder or a bucket that all workers see. Each file appears whole."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._objects = Objects(place) if is_address(place) else None

    @functools.cached_property
    def folder(self) -> Path:
        """The folder itself or, for a bucket, a temporary folder for this process's copies."""
        if self._objects is None:
            Path(self.place).mkdir(parents=True, exist_ok=True)
            return Path(self.place)
        folder = tempfile.mkdtemp(prefix="m4-beam-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yields a path to write; the file appears under its name at the end."""
        with whole(self.folder / name) as part:
            yield part
        if self._objects is not None:
            self._objects.put(name, self.folder / name)
            (self.folder / name).unlink()

    def write(self, name: str, content: bytes) -> None:
        with self.writing(name) as part:
            part.write_bytes(content)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """Yields the path of a file or, for a bucket, that of a temporary copy.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        path = self.folder / name
        if self._objects is None:
            os.stat(path)
            yield path
            return
        self._objects.download(name, path)
        yield path
        path.unlink()

    def array(self, name: str, kind: npt.DTypeLike, start: int = 0, stop: int = -1) -> Array:
        kind = np.dtype(kind)
        size, place = (stop - start) * kind.itemsize, start * kind.itemsize
        if stop >= 0 and self._objects is not None:
            return np.frombuffer(self._objects.part(name, place, size), kind)
        with self.reading(name) as path:
            return np.fromfile(path, kind, max(stop - start, -1), offset=place)

    def arrays(self, name: str) -> dict[str, Array]:
        with self.reading(name) as path, np.load(path) as found:
            return dict(found)

    def json(self, name: str) -> Any:
        """Returns the content of a file, or None if it does not exist."""
        with contextlib.suppress(FileNotFoundError), self.reading(name) as path:
            return json.loads(path.read_bytes())
        return None

    def made(self) -> set[str]:
        """Returns the names of all finished shards."""
        names = self._objects.list() if self._objects is not None else os.listdir(self.folder)
        return {name[:-5] for name in names if name.endswith(".json") and name[0] != "."}

    def discard(self, *names: str) -> None:
        """Removes files, skipping missing ones."""
        if self._objects is not None:
            self._objects.delete(*names)
            return
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock. Raises Busy if another command holds it."""
        where = f"data_dir = {self.place.rpartition('/')[0]}"
        if self._objects is None:
            with local_lock(self.folder / ".lock", where):
                yield
            return
        lock = BucketLock(self._objects, "beam", uuid.uuid4().hex, where, _end_process)
        lock.acquire()
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(PERIOD_SECONDS):
                with contextlib.suppress(*ERRORS):
                    lock.check()

        threading.Thread(target=renew, daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            lock.release()

    def remove(self) -> None:
        """Removes all files except the lock in a bucket."""
        if self._objects is not None:
            self._objects.delete(*(name for name in self._objects.list() if name[0] != "."))
        remove(self.folder)


def _end_process(said: str) -> None:
    print(f"m4: {said}", file=sys.stderr, flush=True)
    os._exit(LOST_STATUS)


# Code that runs in workers.


@functools.lru_cache(1)
def _opened(place: str, name: str) -> "_Job":
    """Returns a job opened in a worker. Raises InputError if the worker has other code."""
    work = Work(place)
    if (job := work.json(f"{name}.job")) is None:
        raise InputError(f"a worker finds no {name}.job in {place}: all must see data_dir there")
    here, there = _code(job.get("source"), job.get("cleaning")), job["code"]
    for of in (of for of in there if here[of] != there[of]):
        said = f"a worker has another {of} ({here[of][:12]}) than the command"
        raise InputError(f"{said} ({there[of][:12]}): install the same one there")
    return {"text": _Text, "sentences": _Sentences, "tokens": _Tokens}[job["kind"]](work, job)


class _Job:
    """A job opened in a worker. Each of its units becomes a shard in each of its segments."""

    def __init__(self, work: Work, job: Mapping[str, Any]) -> None:
        self.work, self._job = work, job

    def segment(self, number: int, unit: int, given: Iterable[Fact]) -> Iterator[Made]:
        """Takes a unit through a segment, unless its shard exists, and yields the results.

        `given` are facts of the segment before: ("shard", name), ("repeated", kind, digest, [file,
        start, stop]) for rows with earlier rows' keys, ("fitted", value). The results are (output,
        element): "shards" (unit, fact), "keys" (bucket, (unit, kind, file, start, stop)), "counts"
        (pair, counts) and "metrics" (name, number).
        """
        raise NotImplementedError

    def repeated(
        self, _bucket: str, given: Iterable[tuple[int, int, str, int, int]]
    ) -> Iterator[tuple[int, Any]]:
        """Yields (unit, fact) for the rows of a bucket whose keys earlier rows have."""
        parts = sorted(given)
        rows = [self.work.array(file, KEY, *place) for _, _, file, *place in parts]
        every, ends = np.concatenate(rows), np.cumsum([*map(len, rows)])
        shards = np.repeat([self._job["units"][unit][1] for unit, *_ in parts], [*map(len, rows)])
        # Among rows with equal keys, the first row of the first shard is the original.
        _, firsts, kind_of = np.unique(every["key"], return_index=True, return_inverse=True)
        first = firsts[kind_of]
        again = np.flatnonzero(first != np.arange(len(every)))
        found = np.empty(len(again), _AGAIN)
        found["number"], found["shard"] = every["number"][again], shards[first[again]]
        found["first"] = every["number"][first[again]]
        file = _stored(self.work, found.tobytes(), "again") if len(found) else ""
        places = pairwise([0, *np.searchsorted(again, ends).tolist()])
        for (unit, kind, *_), (start, stop) in zip(parts, places, strict=True):
            if stop > start:
                digest = hashlib.sha256(found["number"][start:stop].tobytes()).hexdigest()
                yield unit, ("repeated", kind, digest, [file, start, stop])

    def _end(self, name: str, about: Mapping[str, Any]) -> None:
        self.work.write(f"{name}.json", json.dumps(about).encode())


class _Text(_Job):
    """Cleans the files of a source."""

    def __init__(self, work: Work, job: Mapping[str, Any]) -> None:
        super().__init__(work, job)
        cleaning = from_json(job["cleaning"])
        if _hash(cleaning.identity()) != job["checks"]:
            raise InputError(
                "a worker's checks differ from the command's (CorpusSpec.cleaning; does only one "
                "have a language identifier?): install the same packages there"
            )
        self._source: Source = from_json(job["source"])
        self._recorded = Recorded(self._source)
        self._cleaner = Cleaner(cleaning, self._source, job["pairs"], Path())
        self._stages = [*self._cleaner.opened]
        self._bounds = [-1, *job["barriers"], len(self._stages)]
        self._held_out = {stage: self.work.arrays(f) for stage, f in job["held_out"].items()}
        for stage, arrays in self._held_out.items():
            _held_out(self._cleaner)[stage].load(arrays)

    def segment(self, number: int, unit: int, given: Iterable[Fact]) -> Iterator[Made]:
        pair, index, identity, _ = self._job["units"][unit]
        facts = sorted(given)
        # The places of rows are left out, as they change with the other files of the corpus.
        name = f"{identity}.{number}.{_hash([fact[:3] for fact in facts])[:16]}"
        former = _shard(facts)
        about = self.work.json(f"{name}.json")
        if about is None:
            about = self._made(name, number, pair, index, facts)
            self._end(name, about)
        if former is not None:
            self.work.discard(*(f"{former}.{what}" for what in _TEXT))
        yield "shards", (unit, ("shard", name))
        if about["counts"] is not None:
            yield "counts", (pair, Counter(dict(about["counts"])))
        if number < len(self._bounds) - 2:
            yield from _keys(unit, name, [f"{pair} {n}" for n in range(about["kinds"])], about)
            return
        count = about["count"]
        for counter in ("dropped", "changed", "not_checked"):
            for reason, pairs in count.get(counter, {}).items():
                yield "metrics", (f"{pair}: {counter}: {reason}", pairs)
        yield "metrics", (f"{pair}: kept", count["kept"])

    def _made(
        self, name: str, number: int, pair: str, index: int, facts: Sequence[Any]
    ) -> dict[str, Any]:
        """Writes a shard; returns the content of its JSON file."""
        first, last = self._bounds[number : number + 2]
        checks, not_checked = self._cleaner.checks(pair, "train")
        at_end = last == len(self._stages)
        last_stage = "" if at_end else self._stages[last]
        barrier = checks.get(last_stage)
        keys: list[list[Array]] = []  # for each chunk, rows of type KEY by kind of key
        counts: Counter[Any] = Counter()

        def noted(stream: Iterator[Chunk]) -> Iterator[Chunk]:
            """Collects what the barrier's check needs or, at the end, the keys of sentences."""
            for chunk in stream:
                if isinstance(barrier, FittedCheck):
                    counts.update(part.told(last_stage, barrier.measure, chunk))
                elif at_end or isinstance(barrier, FirstCheck):
                    own = isinstance(barrier, FirstCheck) and barrier.keys
                    sides = [*map(chunk.digests, SIDES)] if at_end else []
                    found = part.told(last_stage, own, chunk) if own else sides
                    keys.append([np.rec.fromarrays((of, chunk.numbers), KEY) for of in found])
                yield chunk

        with contextlib.ExitStack() as stack:
            if (former := _shard(facts)) is None:
                about: dict[str, Any] = {"read": name, "held_out": [], "kinds": 0}
                self._cleaner.tallies.clear()
                part = Part(pair, "train", Count())
                part.where = self._recorded.where
                shard = shards_of(self._source, pair, "train")[index]
                stream = part.read(self._recorded.noted(shard.pairs()))
            else:
                about = self.work.json(f"{former}.json")
                part = Part(pair, "train", Count.from_json(about["count"]))
                places = f"{about['read']}.places"
                part.where = lambda number: place_of(
                    about["files"], self.work.array(places, np.int64), number
                )
                try:
                    stream = _read(self.work, former, stack)
                except FileNotFoundError:  # removed when another shard was made from it
                    self._made(former, number - 1, pair, index, about["facts"])
                    stream = _read(self.work, former, stack)
            for stage in self._stages[max(first, 0) : last]:
                if stage in checks:
                    look = self._look(checks[stage], facts, part.count.read, about["kinds"])
                    stream = part.checked(stage, look, stream)
            _write(self.work, name, stack, part, noted(stream))
        if former is None:
            part.leave_to_others(not_checked)
            tallies = self._cleaner.tallies.items()
            about["tallies"] = {file: [t.skipped, t.normalised] for file, t in tallies}
            about["files"], found = self._recorded.found()
            self.work.write(f"{name}.places", found.tobytes())
        about["held_out"] += self._learned(name)
        kinds = [np.concatenate(of_kind) for of_kind in zip(*keys, strict=True)]
        codes = split_direction(pair) if at_end else [pair] * len(kinds)
        about |= {"facts": facts, "kinds": len(kinds), "keys": self._sorted(name, codes, kinds)}
        about |= {"count": part.count.as_json()}
        about["counts"] = [*counts.items()] if isinstance(barrier, FittedCheck) else None
        return about

    def _look(self, check: AnyCheck, facts: Sequence[Any], pairs: int, kinds: int) -> Check:
        """Returns the check of a stage; that of a barrier uses the facts about all pairs.

        `pairs` is the number of pairs that the shard has read, `kinds` its number of kinds of keys.
        """
        if isinstance(check, FittedCheck):
            fitted = next(fact[1] for fact in facts if fact[0] == "fitted")
            return lambda chunk: check.judge(chunk, fitted)
        if not isinstance(check, FirstCheck):
            return check
        again = np.zeros((kinds, pairs + 1), bool)
        for kind in range(kinds):
            again[kind, _again(self.work, facts, kind)["number"]] = True
        return lambda chunk: check.judge(chunk, [*again[:, chunk.numbers]])

    def _sorted(self, name: str, of: Sequence[str], kinds: Sequence[Array]) -> list[list[int]]:
        """Writes the sorted keys of each kind, named in `of`; returns where their buckets start."""
        found = []
        for kind, (name_of, rows) in enumerate(zip(of, kinds, strict=False)):
            bits = self._job["bits"][name_of]
            rows["key"] = mix(rows["key"])  # keys of a user's stage may be small numbers
            rows = rows[np.argsort(rows["key"], kind="stable")]
            firsts = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
            starts = np.searchsorted(rows["key"], firsts)
            self.work.write(f"{name}.{kind}.keys", rows.tobytes())
            found.append([0, *starts.tolist(), len(rows)])
        return found

    def _learned(self, name: str) -> list[list[str]]:
        """Writes what stages learned from this shard, resets them, and returns the files."""
        found = []
        for stage, before in self._held_out.items():
            opened = _held_out(self._cleaner)[stage]
            now = opened.arrays()
            new = {key: of for key, of in now.items() if len(of) > len(before.get(key, ()))}
            if new:
                found.append([stage, f"{name}.{len(found)}.npz"])
                self.work.write(found[-1][1], _npz(new))
                opened.load(before)
        return found

    def fitted(self, number: int, pair: str, counts: Counter[Any]) -> Iterator[tuple[int, Any]]:
        """Yields (unit, fact) for all shards of two languages, with the value that counts give."""
        check = self._cleaner.checks(pair, "train")[0][self._stages[self._bounds[number + 1]]]
        assert isinstance(check, FittedCheck)
        value = check.fit(counts)
        for unit, (of, *_) in enumerate(self._job["units"]):
            if of == pair:
                yield unit, ("fitted", value)


class _Sentences(_Job):
    """Finds the sentences of cleaned shards that occur earlier in their language."""

    def segment(self, number: int, unit: int, given: Iterable[Fact]) -> Iterator[Made]:
        pair, _, name = self._job["units"][unit]
        codes, shard = split_direction(pair), name
        if number == 0:
            yield from _keys(unit, shard, codes, self.work.json(f"{shard}.json"))
        else:
            about = {"codes": codes, "shard": shard, "facts": sorted(given)}
            if self.work.json(f"{(name := f'{shard}.{_hash(about)[:16]}')}.json") is None:
                self._end(name, about)
        yield "shards", (unit, ("shard", name))


class _Tokens(_Job):
    """Tokenizes ranges of text."""

    def __init__(self, work: Work, job: Mapping[str, Any]) -> None:
        super().__init__(work, job)
        self._kept = contextlib.ExitStack()  # vocabularies are read when they are first used
        opened = functools.cache(lambda name: self._kept.enter_context(work.reading(name)))
        arrays = [TokenArray(*one) for one in job["arrays"]]
        arrays = [a._replace(vocabulary=opened(a.vocabulary)) for a in arrays]
        self._tokenizer = RangeTokenizer(arrays, job["ways"], job["alpha"])
        self._types = {a.store: id_type(a.vocabulary) for a in arrays}

    def segment(self, number: int, unit: int, given: Iterable[Fact]) -> Iterator[Made]:
        name = self._job["units"][unit]
        if self.work.json(f"{name}.json") is None:
            arrays: dict[str, Array] = {}
            content = self.work.array(f"{name}.text", np.uint8).tobytes()
            head, _, text = content.partition(b"\n")
            for place, (path, *of) in enumerate(spans := json.loads(head)):
                span = TextRange(Path(path), *of)
                start = span.start - spans[0][1]
                made = self._tokenizer.of(span, text[start : start + span.stop - span.start])
                for store, ways in made.items():
                    for way, ragged in enumerate(ways):
                        found = ragged.ids.astype(self._types[store])
                        arrays[f"{place} {store} {way} ids"] = found
                        arrays[f"{place} {store} {way} lengths"] = ragged.lengths.astype(np.int32)
            self.work.write(f"{name}.npz", _npz(arrays))
            self._end(name, {})
        self.work.discard(f"{name}.text")
        yield "shards", (unit, ("shard", name))


def _stored(work: Work, content: bytes, kind: str) -> str:
    """Writes a file that is named by the hash of its content; returns its name."""
    name = f"{hashlib.sha256(content).hexdigest()}.{kind}"
    work.write(name, content)
    return name


def _keys(
    unit: int, name: str, names: Sequence[str], about: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields the buckets with keys of a shard; `names` has a name for each kind of keys."""
    for kind, starts in enumerate(about["keys"]):
        for bucket, (start, stop) in enumerate(pairwise(starts)):
            if stop > start:
                place = unit, kind, f"{name}.{kind}.keys", start, stop
                yield "keys", (f"{names[kind]} {bucket}", place)


def _shard(facts: Iterable[Any]) -> str | None:
    """Returns the name of the shard of the segment before, or None for the first segment."""
    return next((fact[1] for fact in facts if fact[0] == "shard"), None)


def _again(work: Work, facts: Iterable[Any], kind: int) -> Array:
    """Returns a shard's repeated rows (`_AGAIN`) for a kind of keys, in no order."""
    places = [fact[3] for fact in facts if fact[0] == "repeated" and fact[1] == kind]
    return np.concatenate([np.empty(0, _AGAIN), *(work.array(f, _AGAIN, *at) for f, *at in places)])


def _write(
    work: Work, name: str, stack: contextlib.ExitStack, part: Part, stream: Iterable[Chunk]
) -> None:
    """Writes the text of a shard; the files appear when `stack` is closed."""
    paths = [stack.enter_context(work.writing(f"{name}.{what}")) for what in _TEXT]
    *sides, numbers = (stack.enter_context(path.open("wb")) for path in paths)
    for chunk in stream:
        for file, side in zip(sides, SIDES, strict=True):
            file.write(sentence_lines(chunk.side(side), chunk, part.pair, part.split))
        chunk.numbers.astype(np.uint32).tofile(numbers)


def _read(work: Work, name: str, stack: contextlib.ExitStack) -> Iterator[Chunk]:
    """Returns the chunks of a shard. Raises FileNotFoundError if its text is missing."""
    paths = [stack.enter_context(work.reading(f"{name}.{what}")) for what in _TEXT]
    numbers = np.fromfile(paths.pop(), np.uint32).astype(np.int64)
    sides = [stack.enter_context(p.open(encoding="utf-8", newline="\n")) for p in paths]
    return (
        Chunk(part, *([line[:-1] for line in islice(file, PAIRS)] for file in sides))
        for part in np.split(numbers, range(PAIRS, len(numbers), PAIRS))
        if len(part)
    )


def _held_out(cleaner: Cleaner) -> dict[str, HeldOut]:
    return {name: of for name, of in cleaner.opened.items() if isinstance(of, HeldOut)}


def _npz(arrays: Mapping[str, Array]) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def _do(element: tuple[Any, ...], place: str, name: str, step: str, *given: Any) -> list[Any]:
    """Runs steps of a job one at a time, as runners give a process several bundles at once."""
    with _TURN:
        return [*getattr(_opened(place, name), step)(*given, *element)]


def _segment(*given: Any) -> Iterator[Any]:
    from apache_beam.metrics import Metrics  # pyright: ignore[reportMissingImports]
    from apache_beam.pvalue import TaggedOutput  # pyright: ignore[reportMissingImports]

    for output, value in _do(*given):
        if output == "metrics":
            Metrics.counter("m4", value[0]).inc(value[1])
        else:
            yield TaggedOutput(output, value)


def _added(counters: Iterable[Counter[Any]]) -> Counter[Any]:
    return sum(counters, Counter())


def _end(element: tuple[int, Iterable[tuple[int, Fact]]], place: str, name: str) -> None:
    """Writes the names of a job's shards, in the order of its units."""
    names = [fact[1] for _, fact in sorted(element[1]) if fact[0] == "shard"]
    Work(place).write(f"{name}.done", json.dumps(names).encode())


def program(parent: int, place: str, name: str, *given: str) -> None:
    """Runs a job's pipeline in Beam's environment until its parent ends; prints its counters.

    Raises:
        InputError: Beam refuses an option, or a line of the corpus is bad.
    """
    end_with(parent)
    import apache_beam as beam  # pyright: ignore[reportMissingImports]

    options = _options(given)
    job = Work(place).json(f"{name}.job")
    units = range(len(job["units"]))
    with beam.Pipeline(options=options) as pipeline:
        ready = pipeline | beam.Create([(unit, []) for unit in units]) | beam.Reshuffle()
        barriers = len(job["barriers"])
        for number in range(barriers + 1):
            made = ready | f"segment {number}" >> beam.FlatMap(
                _segment, place, name, "segment", number
            ).with_outputs("shards", "keys", "counts")
            shards = made.shards
            if number == barriers:
                break
            repeated = (
                made.keys
                | f"keys {number}" >> beam.GroupByKey()
                | f"repeated {number}" >> beam.FlatMap(_do, place, name, "repeated")
            )
            fitted = (
                made.counts
                | f"counts {number}" >> beam.CombinePerKey(_added)
                | f"fitted {number}" >> beam.FlatMap(_do, place, name, "fitted", number)
            )
            known = (shards, repeated, fitted) | f"facts {number}" >> beam.Flatten()
            ready = known | f"known {number}" >> beam.GroupByKey()
        _ = (
            shards
            | "one" >> beam.Map(lambda shard: (0, shard))
            | "all" >> beam.GroupByKey()
            | "end" >> beam.Map(_end, place, name)
        )
    for counter in pipeline.result.metrics().query()["counters"]:
        if counter.key.metric.namespace == "m4":
            print(f"{counter.key.metric.name}: {counter.committed}")


def _options(given: Sequence[str]) -> Any:
    """Returns Beam's options. Raises InputError if Beam refuses one."""
    from apache_beam.options.pipeline_options import PipelineOptions  # pyright: ignore[reportMissingImports]
    from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator  # pyright: ignore[reportMissingImports]
    from apache_beam.version import __version__ as beam_version  # pyright: ignore[reportMissingImports]

    said, log = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stderr(said):
            options = PipelineOptions([*given])
            runner = options.get_all_options()["runner"]
    except SystemExit as error:
        raise InputError(f"--beam_options: {said.getvalue().splitlines()[-1]}") from error
    finally:
        logging.getLogger().removeHandler(handler)
    if unknown := re.search(r"unparseable args: \[(.*)\]", log.getvalue()):
        raise InputError(f"--beam_options: Beam has no option {unknown[1]}")
    if runner in ("FlinkRunner", "SparkRunner") and not (
        shutil.which("java") or any(one.startswith("--job_endpoint") for one in given)
    ):
        raise InputError(
            f"--runner: {runner} needs java on the PATH, or --beam_options=--job_endpoint=HOST:PORT"
        )
    if runner == "DataflowRunner" and importlib.util.find_spec("google.cloud") is None:
        raise InputError(
            "--runner=dataflow needs Google's clients next to Beam: uv pip install --python "
            f"{sys.executable} 'apache-beam[gcp]=={beam_version}'"
        )
    if wrong := PipelineOptionsValidator(options, runner).validate():
        raise InputError(f"--beam_options: {' '.join(wrong[0].split())}")
    return options


# Code that runs in the command.


@dataclasses.dataclass
class Engine:
    """Runner of Beam pipelines for `m4 data prepare`.

    Attributes:
        runner: Name of Beam's runner in small letters, without "Runner": "direct", "dataflow".
        options: Command-line options for Beam.
        workers: Number of processes of the direct runner. It does not change the corpus.
        work: Files of the jobs, which are kept until the corpus is finished.
        progress: Function called with (stage, done, total).
    """

    runner: str
    options: Sequence[str]
    workers: int
    work: Work = dataclasses.field(init=False)
    progress: Progress = lambda *_: None

    def __post_init__(self) -> None:
        self._python()

    def check(self, source: Source, cleaning: Cleaning) -> None:
        """Raises InputError or SettingError for a source or cleaning that workers cannot run."""
        given = [*_described(source, cleaning).values()]
        wrong = [f"{m} needs TensorFlow (workers lack it)" for m in _modules(given) if m in _FLOW]
        if gives_ids(source):
            wrong = ["only text is prepared on Beam, and the source gives ids"]
        if wrong:
            raise InputError(f"--runner={self.runner}: {wrong[0]}")

    @contextlib.contextmanager
    def opened(self, place: str) -> Iterator[None]:
        """Opens and locks the place of shards, and empties it at the end. Raises Busy if locked."""
        self.open(place)
        with self.work.locked():
            yield
            self.work.remove()

    def open(self, place: str) -> None:
        """Sets the folder or bucket of shards. Raises InputError if it cannot be written to."""
        if self.runner == "dataflow" and not is_address(place):
            needs = "--runner=dataflow needs a bucket, gs://BUCKET/..."
            raise InputError(f"data_dir = {place.removesuffix('/.beam')}: {needs}")
        self.work = Work(place)
        self.work.write("started", b"")

    def clean(self, cleaner: Cleaner, source: Source, pairs: Sequence[str]) -> "Cleaned":
        """Returns the cleaned training text, and adds its counts to the cleaner's ledger.

        Args:
            cleaner: Cleaner that has already cleaned dev and test.
        """
        english = [pair for pair in pairs if pair.startswith("en-")]
        others = [pair for pair in pairs if pair not in english]
        sizes = {pair: sum(map(_size, shards_of(source, pair, "train"))) for pair in pairs}
        compared: Counter[str] = Counter()  # pair or language -> bytes of its text
        for pair, size in sizes.items():
            compared.update(dict.fromkeys((pair, *split_direction(pair)), size))
        bits = {of: (size // _BUCKET_BYTES).bit_length() for of, size in compared.items()}
        units = []
        # Stages that remember held-out text learn from pairs with English what to drop from others.
        for some in filter(None, (english, others) if _held_out(cleaner) else (pairs,)):
            job = self._job(cleaner, source, some, bits)
            segments = 1 + len(job["barriers"])
            parts = {f"{u[2]}.{n}": u[3] / segments for u in job["units"] for n in range(segments)}
            shown = self._shown(f"{TEXT}{' without English' * (some is others)}", parts)
            names = self._run(job, shown)
            for (pair, *_), name in zip(job["units"], names, strict=True):
                self._add(cleaner, pair, self.work.json(f"{name}.json"))
                units.append((pair, len(units), name))
        job = {"kind": "sentences", "units": units, "barriers": [0]}
        parts = dict.fromkeys((name for *_, name in units), 1.0)
        names = self._run(job, self._shown("sentences", parts))
        return Cleaned(self.work, hasattr(source, "reading"), names)

    def _shown(self, stage: str, parts: Mapping[str, float]) -> Callable[[set[str]], None]:
        """Returns a function that shows progress; a part is a shard's name up to its last dot."""

        def shown(made: set[str]) -> None:
            there = {name.rpartition(".")[0] for name in made}
            done = sum(size for part, size in parts.items() if part in there)
            self.progress(stage, round(done), round(sum(parts.values())))

        return shown

    def _add(self, cleaner: Cleaner, pair: str, about: Mapping[str, Any]) -> None:
        """Adds to the command's cleaner what a worker counted and learned from a shard."""
        tallies = {}
        for file, (skipped, normalised) in about["tallies"].items():
            tallies[file] = Tally(Reading("", "skip"), file, file, "")
            tallies[file].skipped.update(skipped)
            tallies[file].normalised.update(normalised)
        cleaner.add(pair, "train", Count.from_json(about["count"]), tallies)
        for stage, file in about["held_out"]:
            opened = _held_out(cleaner)[stage]
            arrays = opened.arrays()
            for key, new in self.work.arrays(file).items():
                arrays[key] = np.union1d(arrays[key], new) if key in arrays else new
            opened.load(arrays)

    def _job(
        self, cleaner: Cleaner, source: Source, pairs: Sequence[str], bits: Mapping[str, int]
    ) -> dict[str, Any]:
        held_out = {
            stage: _stored(self.work, _npz(opened.arrays()), "npz")
            for stage, opened in _held_out(cleaner).items()
        }
        text, cleaning = source.identity(), cleaner.cleaning
        by_pair = text.pop("by_pair", {})
        given = _described(source, cleaning)
        code = _code(*given.values())
        decides = [code, text, cleaning.identity(), held_out]
        units = []
        for pair in pairs:
            own_bits = [bits[of] for of in (pair, *split_direction(pair))]
            for index, shard in enumerate(shards_of(source, pair, "train")):
                files = [[os.fspath(path), *digest(path)] for path in shard.paths]
                of = files or [by_pair.get(pair), index]
                units.append((pair, index, _hash([decides, of, own_bits, pair]), _size(shard)))
        stages = [*cleaner.opened]
        barriers = {
            stages.index(stage)
            for pair in pairs
            for stage, check in cleaner.checks(pair, "train")[0].items()
            if isinstance(check, FirstCheck | FittedCheck)
        }
        return {
            "kind": "text",
            "code": code,
            **given,
            "checks": _hash(cleaning.identity()),
            "pairs": pairs,
            "held_out": held_out,
            "units": units,
            "bits": bits,
            "barriers": sorted(barriers),
        }

    def tokenized(
        self,
        spans: Sequence[TextRange],
        arrays: Sequence[TokenArray],
        ways: int,
        alpha: float | None,
    ) -> Iterator[Tokenized]:
        """Yields the ranges' results in their order, as `tokenizing.tokenized` does."""
        files = {a.vocabulary for a in arrays}
        names = {path: _stored(self.work, path.read_bytes(), "model") for path in files}
        given = [[*a._replace(vocabulary=names[a.vocabulary])] for a in arrays]  # type: ignore
        decides = [_code(), given, ways, alpha]
        most = max(1, min(_SPANS, len(spans) // 64))
        by_file = ([*of_file] for _, of_file in groupby(spans, lambda span: span.path))
        groups = [of[start : start + most] for of in by_file for start in range(0, len(of), most)]
        units, sizes, there = [], dict[str, float](), self.work.made()
        for group in groups:
            with group[0].path.open("rb") as file:
                file.seek(group[0].start)
                text = file.read(group[-1].stop - group[0].start)
            part = _hash([decides, hashlib.sha256(text).hexdigest(), *(s[1:] for s in group)])
            if (name := f"{part}.ids") not in there:
                head = json.dumps([[s.path.name, *s[1:]] for s in group])
                self.work.write(f"{name}.text", head.encode() + b"\n" + text)
            units.append(name)
            sizes[part] = len(text)
        job = {"kind": "tokens", "units": units, "arrays": given, "ways": ways, "alpha": alpha}
        job["barriers"] = []
        names = self._run(job, self._shown(f"{TEXT} to tokens", sizes))
        for group, name in zip(groups, names, strict=True):
            found = self.work.arrays(f"{name}.npz")
            for number, span in enumerate(group):
                yield {
                    store: [
                        Ragged(*(found[f"{number} {store} {way} {f}"] for f in Ragged._fields))
                        for way in range(ways if span.train else 1)
                    ]
                    for store in span.stores
                }

    def _run(self, job: dict[str, Any], progress: Callable[[set[str]], None]) -> list[str]:
        """Runs a job and returns the names of its shards, in the order of its units.

        Args:
            progress: Function called with the names of all finished shards.

        Raises:
            InputError: The user made a mistake; the message is that of one machine.
            WorkersFailed: Workers failed in another way; the message names the log.
        """
        job = {"code": _code(), **job}
        name = _hash(json.dumps(job))
        self.work.write(f"{name}.job", json.dumps(job).encode())
        log = self.work.folder / f"{name[:12]}.log"
        given = [str(os.getpid()), self.work.place, name, *self._options()]
        command = [self._python(), "-c", _PROGRAM, *given]
        env, said = self._environment(), ""
        for _ in range(_TRIES):
            with log.open("wb") as file:
                running = subprocess.Popen(command, stdout=file, stderr=file, env=env)
                try:
                    while running.poll() is None:
                        progress(self.work.made())
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            running.wait(_POLL_SECONDS)
                finally:
                    running.kill()
                    running.wait()
            if running.returncode == 0:
                return self.work.json(f"{name}.done")
            said = log.read_text("utf-8", "replace")
            if _LOST not in said:
                break
        if is_address(self.work.place):
            self.work.write(log.name, said.encode())  # the local folder is temporary
        raise self._failure(said, f"{self.work.place}/{log.name}")

    def _failure(self, said: str, log: str) -> InputError:
        mistake = r"(?:InputError|SettingError): (.*?)(?: \[while running .*)?$"
        if found := re.findall(mistake, said, re.M):
            return InputError(found[-1])
        if "Unable to fetch remote" in said:
            own = "prism_location" if self.runner == "prism" else f"{self.runner}_job_server_jar"
            lacking = "lacks the program that runs it and cannot download it"
            return InputError(
                f"--runner={self.runner}: Beam {lacking}: give --beam_options=--{own}=FILE"
            )
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "no output")
        return WorkersFailed(f"{self.runner}: {last} (the workers' output: {log})")

    def _options(self) -> list[str]:
        direct = ["--direct_running_mode=multi_processing", f"--direct_num_workers={self.workers}"]
        own = direct if self.runner == "direct" and self.workers > 1 else []
        return [f"--runner={self.runner.capitalize()}Runner", *own, *self.options]

    def _python(self) -> str:
        """Returns the path of the Python that has Beam."""
        if importlib.util.find_spec("apache_beam") is not None:
            return sys.executable
        python = Path(sys.prefix) / "share" / "m4" / "beam" / "bin" / "python"
        if not python.exists():
            needs = "needs Apache Beam, which is not installed: make beam"
            raise InputError(f"--runner={self.runner} {needs}")
        return str(python)

    def _environment(self) -> dict[str, str]:
        # This Python's packages are left out, but not all of sys.prefix, which may hold a checkout.
        packages = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
        own = [p for p in sys.path if not p.startswith(tuple(packages))]
        return {**os.environ, "PYTHONPATH": os.pathsep.join([p or "." for p in own])}


class Cleaned:
    """Cleaned training text in shards, which `write` adds to the files of a corpus.

    Args:
        knows: Whether the source knows the file and line of each pair.
        names: Shards of the last job, which finds repeated sentences.
    """

    def __init__(self, work: Work, knows: bool, names: Sequence[str]) -> None:
        self._work, self._knows = work, knows
        found = [work.json(f"{name}.json") for name in names]
        self._shards = [{**work.json(f"{one['shard']}.json"), **one} for one in found]
        self._numbers = {
            code: Numbers([of["count"]["read"] * (code in of["codes"]) for of in self._shards])
            for code in {code for of in self._shards for code in of["codes"]}
        }

    def write(
        self, pair: str, texts: Sequence[Path], pairs: Path, origins: Path
    ) -> tuple[int, dict[str, list[str]]]:
        """Adds the shards of two languages: new sentences, all pairs' numbers, and origins.

        Returns:
            Number of pairs, and the manifest's entry on the files that were read.
        """
        files: dict[str, int] = {}
        kept, opened = 0, [*texts, pairs, *([origins] if self._knows else [])]
        with contextlib.ExitStack() as stack:
            first, second, of_pairs, *of_origins = (
                stack.enter_context(path.open("ab")) for path in opened
            )
            for number, shard in enumerate(self._shards):
                if tuple(shard["codes"]) != split_direction(pair):
                    continue
                name, columns = shard["shard"], []
                numbers = self._work.array(f"{name}.numbers", np.uint32).astype(np.int64)
                codes = zip(shard["codes"], SIDES, (first, second), strict=True)
                for kind, (code, side, text) in enumerate(codes):
                    again = _again(self._work, shard["facts"], kind)
                    found, new = self._numbers[code].add(number, numbers, again)
                    check_sentences(code, self._numbers[code]._count)
                    columns.append(found)
                    with self._work.reading(f"{name}.{side}") as path, path.open("rb") as file:
                        text.writelines(compress(file, new.tobytes()))
                np.stack(columns, axis=1).tofile(of_pairs)
                kept += len(numbers)
                for file in of_origins:
                    own = [files.setdefault(one, len(files)) for one in shard["files"]]
                    places = self._work.array(f"{shard['read']}.places", np.int64)[numbers - 1]
                    (np.array([*own, 0])[places // FILE] * FILE + places % FILE).tofile(file)
        return kept, {"files": [*files]} if self._knows else {}


class Numbers:
    """Numbers a language's sentences in the order of first occurrence, with 1.5 bits per pair read.

    The bit of a pair is 1 if its sentence occurs there first. A sentence's number is the count of
    1s before its bit; this count is stored for each word of 64 bits.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Starts without sentences; `sizes` are the numbers of pairs that the shards have read."""
        self._starts = np.cumsum([0, *(size // 64 + 1 for size in sizes)])
        self._bits = np.zeros(self._starts[-1], "<u8")
        self._before = np.zeros(self._starts[-1], np.uint32)
        self._count = 0

    def add(self, shard: int, numbers: Ints, again: Array) -> tuple[U32, Mask]:
        """Returns [n] the number of each sentence of the next shard, and whether it is new.

        Args:
            numbers: Numbers of the shard's pairs, from 1, ascending.
            again: Rows of type `_AGAIN` for the repeated sentences.
        """
        start, stop = self._starts[shard : shard + 2]
        rows = np.searchsorted(numbers, again["number"])
        new = np.ones(len(numbers), bool)
        new[rows] = False
        bits = np.zeros(64 * (stop - start), bool)
        bits[numbers[new]] = True
        self._bits[start:stop] = np.packbits(bits, bitorder="little").view("<u8")
        counts = np.cumsum(np.bitwise_count(self._bits[start:stop]), dtype=np.int64)
        self._before[start + 1 : stop] = self._count + counts[:-1]
        self._before[start] = self._count
        self._count += int(counts[-1])
        words, places = start + numbers // 64, numbers.astype(np.uint64)
        words[rows] = self._starts[again["shard"]] + again["first"] // 64
        places[rows] = again["first"]
        below = (np.uint64(1) << places % np.uint64(64)) - np.uint64(1)
        return self._before[words] + np.bitwise_count(self._bits[words] & below), new


def _size(shard: Shard, most: int | None = None) -> int:
    """Returns the stored bytes of a shard's files, or about those of the first `most` lines."""
    sizes = []
    for path in shard.paths:
        sizes.append(path.stat().length)
        if most is not None:
            text = b"\n".join(islice(lines(path, MAX_LINE_BYTES), most))
            sizes[-1] = min(sizes[-1], len(zlib.compress(text) if packing(path.name) else text))
    return sum(sizes)


def _sampled(source: Source, pair: str) -> tuple[list[Pair], int]:
    """Returns the first training pairs of two languages, and about how many bytes they take."""
    found: list[Pair] = []
    size, in_lines = 0, getattr(source, "unit", "") == "line"
    for shard in shards_of(source, pair, "train"):
        left = _SAMPLED_PAIRS - len(found)
        found += (new := [*islice(shard.pairs(), left)])
        if len(new) == left:  # there may be more pairs
            line = source.reading.origin[1] if in_lines else 0  # type: ignore[attr-defined]
            text = "".join(chain.from_iterable(new))
            return found, size + (_size(shard, line) if in_lines else len(text.encode()))
        size += _size(shard)
    return found, size


def cost(spec: "CorpusSpec", price: float | None) -> str:
    """Returns the estimated cost of a corpus on many machines, from cleaning some pairs here.

    Args:
        price: Dollars per CPU hour, if known.
    """
    source, pairs, ways = spec.opened_source, spec.read_pairs(), spec.segmentations
    cleaner = Cleaner(spec.cleaning, source, pairs, Path())
    sample: list[str] = []
    read = sampled = kinds = 0
    started = time.process_time()
    for pair in pairs[:: 1 + len(pairs) // _SAMPLED_LANGUAGES]:
        part = Part(pair, "train", Count())
        texts, size = _sampled(source, pair)
        found, sampled = [*part.read(texts)], sampled + size
        sample += [f"{text}\n" for chunk in found for side in SIDES for text in chunk.side(side)]
        for stage, check in cleaner.checks(pair, "train")[0].items():
            if isinstance(check, FirstCheck) and found:
                kinds = max(kinds, len(check.keys(found[0])))
            look = alone(part, stage, check, functools.partial(iter, found))
            found = [*part.checked(stage, look, iter(found))]
        read += part.count.read
    seconds = time.process_time() - started
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "vocabulary.model"
        vocabulary.train(model, sample, 1000, [])
        stores = ("",) if spec.target_vocabulary_size is None else ROLES
        arrays = [TokenArray("first", model, 128, None, store) for store in stores]
        tokenizer = RangeTokenizer(arrays, ways, spec.sampling_alpha)
        for some in (sample[:1], sample):  # the first run compiles the loops
            text = "".join(some).encode()
            started = time.process_time()
            tokenizer.of(TextRange(model, 0, len(text), True, stores), text)
        seconds += time.process_time() - started
    total = sum(_size(shard) for pair in pairs for shard in shards_of(source, pair, "train"))
    # A source without files does not tell its size.
    about, number = ("about", total * read / max(sampled, 1)) if total else ("at least", read)
    hours = number * seconds / max(read, 1) / 3600
    dollars = "" if price is None else f", {hours * price:,.2f} dollars"
    keys = number * (kinds + len(SIDES)) * KEY.itemsize  # keys of pairs, and of both sentences

    def digits(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"

    shuffled = f"{digits(keys / 1e9)} GB of keys shuffled"
    return (
        f"{about} {number:,.0f} pairs: {digits(hours)} CPU hours ({read / max(seconds, 1e-9):,.0f} "
        f"pairs a CPU second, measured on {read:,}), {shuffled}{dollars}"
    )
