"""Prepares a corpus on Apache Beam: the stages of one machine, on shards, by any of Beam's runners.

Beam has an environment of its own (`make beam`), without JAX and TensorFlow. `Engine` writes a job
into a folder that all workers see, runs `program` there, and builds the corpus from the shards that
it leaves. A shard is named by the hash of its inputs: one that is there is not made again.

A file's text goes through the stages up to one that must know of other files, a barrier. There the
keys of the pairs are compared, or counts are added; then the next segment of stages begins. Pairs
are numbered by file and line, and the first one wins, whoever comes first. At the end the keys of
the sentences are compared, so that each of a language gets the number of the first one like it.
Text and keys, of 12 bytes a pair or sentence, are files; Beam carries their names, and counts. The
text of a segment goes when that of the next one is there.
"""

import contextlib
import dataclasses
import functools
import hashlib
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
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.arrays import U32, Array, Ints, Mask
from m4.data.cache.corpus_text import FILE, Progress, Recorded
from m4.data.cleaning import AnyCheck, Check, FirstCheck, FittedCheck, HeldOut
from m4.data.cleaning.chunk import PAIRS, Chunk, check_sentences
from m4.data.cleaning.clean import Cleaner, Cleaning, Part, alone, sentence_lines
from m4.data.cleaning.ledger import Count
from m4.data.directions import SIDES, split_direction
from m4.data.sources import Source, shards_of
from m4.data.sources.reading.files import packing
from m4.data.sources.reading.lines import Reading, Tally
from m4.data.vocabulary import Ragged, vocabulary
from m4.data.vocabulary.tokenizing import RangeTokenizer, TextRange, TokenArray, Tokenized, id_type
from m4.parallel.platform.hardware import code_digest
from m4.settings import InputError, SettingError, import_module
from m4.storage.files import remove, whole
from m4.storage.objects import Objects, is_address

_BUCKET_BYTES = 1 << 28  # of text, whose keys one worker sorts in memory
_SPANS = 64  # most ranges of text in a shard of tokens
# Of a pipeline that lost a worker; runners of many machines try bundles again themselves.
_TRIES = 3
_POLL_SECONDS = 1.0
# What is read to measure a cost.
_SAMPLED_LANGUAGES, _SAMPLED_PAIRS = 20, 2000
KEY = np.dtype([("key", "<u8"), ("number", "<u4")])  # of a pair, and its place in its shard
# A pair or sentence whose key an earlier one has: that one's shard, and its place there.
_AGAIN = np.dtype([("number", "<u4"), ("shard", "<u4"), ("first", "<u4")])
_TEXT = (*SIDES, "numbers")  # files of a shard: its sentences, a line each, and its pairs' numbers
_PROGRAM = "import sys; from m4.data import beam; beam.program(*sys.argv[1:])"
_LOST = "Channel closed prematurely"
_TURN = threading.Lock()
Fact = tuple[Any, ...]  # that a segment is told
Made = tuple[str, Any]  # by a segment: output, element


class WorkersFailed(RuntimeError):
    """A pipeline failed, and no input is known to be wrong."""


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def as_json(value: Any, setting: str) -> Any:
    """Returns a setting as JSON, with classes and functions by their names, for `from_json`.

    Raises:
        SettingError: It has what no name and settings make again.
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


def from_json(value: Any) -> Any:
    """Returns what `as_json` described."""
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


def _name(value: Any, setting: str) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    if "<" in name or module in (None, "__main__"):
        allowed = "a dataclass or a function of a module, which workers import (or --runner=local)"
        raise SettingError(setting, value, allowed)
    return f"{module}:{name}"


class Work:
    """The files of a job in a folder or a bucket that all workers see. Each appears whole."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._objects = Objects(place) if is_address(place) else None

    @functools.cached_property
    def folder(self) -> Path:
        """The folder; of a bucket, one of this process's copies."""
        if self._objects is None:
            Path(self.place).mkdir(parents=True, exist_ok=True)
            return Path(self.place)
        folder = tempfile.mkdtemp(prefix="m4-beam-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Gives a path to write, whose file is there at the end."""
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
        """Gives the path of a file; a bucket's is a copy, until the end.

        Raises:
            FileNotFoundError: It is not there.
        """
        path = self.folder / name
        if self._objects is None:
            os.stat(path)
            yield path
            return
        self._objects.download(name, path)
        yield path
        path.unlink()

    def array(self, name: str, kind: npt.DTypeLike) -> Array:
        with self.reading(name) as path:
            return np.fromfile(path, kind)

    def arrays(self, name: str) -> dict[str, Array]:
        with self.reading(name) as path, np.load(path) as found:
            return dict(found)

    def json(self, name: str) -> Any:
        """Returns the content of a file, or None if it is not there."""
        with contextlib.suppress(FileNotFoundError), self.reading(name) as path:
            return json.loads(path.read_bytes())
        return None

    def made(self) -> set[str]:
        """Returns the names of all shards."""
        names = self._objects.list() if self._objects is not None else os.listdir(self.folder)
        return {name[:-5] for name in names if name.endswith(".json") and name[0] != "."}

    def discard(self, *names: str) -> None:
        """Removes files; those that are not there are skipped."""
        if self._objects is not None:
            self._objects.delete(*names)
            return
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def remove(self) -> None:
        if self._objects is not None:
            self._objects.delete(*self._objects.list())
        remove(self.folder)


# Workers.


@functools.lru_cache(1)
def _opened(place: str, name: str) -> "_Job":
    """Returns a job as a worker opens it."""
    work = Work(place)
    if (job := work.json(f"{name}.job")) is None:
        raise InputError(f"a worker finds no {name}.job in {place}: all must see data_dir there")
    if (here := code_digest()) != job["m4"]:
        raise InputError(
            f"a worker has another m4 ({here[:12]}) than the command ({job['m4'][:12]}): "
            "install the same one there"
        )
    return {"text": _Text, "sentences": _Sentences, "tokens": _Tokens}[job["kind"]](work, job)


class _Job:
    """A job as a worker has opened it: its shards, the units, go through its segments."""

    def __init__(self, work: Work, job: Mapping[str, Any]) -> None:
        self.work, self._job = work, job

    def segment(self, number: int, unit: int, given: Iterable[Fact]) -> Iterator[Made]:
        """Takes a shard through a segment, or finds that this is done.

        `given` are facts of the segment before: ("shard", name), ("repeated", kind, file) of keys
        that came before, ("fitted", value). Yields (output of the step, element): shards (unit,
        fact), keys (bucket, (unit, kind, file)), counts, and metrics.
        """
        raise NotImplementedError

    def repeated(
        self, _bucket: str, given: Iterable[tuple[int, int, str]]
    ) -> Iterator[tuple[int, Any]]:
        """Yields (unit, fact): the rows of a bucket with a key that an earlier row has."""
        files = sorted(given)
        rows = [self.work.array(file, KEY) for *_, file in files]
        every, ends = np.concatenate(rows), np.cumsum([*map(len, rows)])
        shards = np.repeat([self._job["units"][unit][1] for unit, *_ in files], [*map(len, rows)])
        # Of equal keys the one of the first shard, and there of the first row, is the first.
        _, firsts, kind_of = np.unique(every["key"], return_index=True, return_inverse=True)
        first = firsts[kind_of]
        again = np.flatnonzero(first != np.arange(len(every)))
        found = np.empty(len(again), _AGAIN)
        found["number"], found["shard"] = every["number"][again], shards[first[again]]
        found["first"] = every["number"][first[again]]
        parts = np.split(found, np.searchsorted(again, ends[:-1]))
        for (unit, kind, _), part in zip(files, parts, strict=True):
            if len(part):
                yield unit, ("repeated", kind, _stored(self.work, part.tobytes(), "again"))

    def _end(self, name: str, about: Mapping[str, Any]) -> None:
        self.work.write(f"{name}.json", json.dumps(about).encode())


class _Text(_Job):
    """Cleans the files of a source."""

    def __init__(self, work: Work, job: Mapping[str, Any]) -> None:
        super().__init__(work, job)
        cleaning = from_json(job["cleaning"])
        if _hash(cleaning.identity()) != job["checks"]:
            raise InputError(
                "a worker's checks are others than the command's (CorpusSpec.cleaning; an "
                "identifier of languages that is there alone?): install the same packages there"
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
        pair, index, identity = self._job["units"][unit]
        facts = sorted(given)
        name, former = _hash([identity, number, facts]), _shard(facts)
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
            for kind, bucket in about["keys"]:
                file = f"{name}.{kind}.{bucket}"
                yield "keys", (f"{pair} {kind} {bucket}", (unit, kind, file))
            return
        count = about["count"]
        for counter in ("dropped", "changed", "not_checked"):
            for reason, pairs in count.get(counter, {}).items():
                yield "metrics", (f"{pair}: {counter}: {reason}", pairs)
        yield "metrics", (f"{pair}: kept", count["kept"])

    def _made(
        self, name: str, number: int, pair: str, index: int, facts: Sequence[Any]
    ) -> dict[str, Any]:
        """Writes a shard; returns what is known of it."""
        first, last = self._bounds[number : number + 2]
        checks, not_checked = self._cleaner.checks(pair, "train")
        at_end = last == len(self._stages)
        barrier = None if at_end else checks.get(self._stages[last])
        keys: list[list[Array]] = []  # of each chunk, KEY rows by kind of key
        counts: Counter[Any] = Counter()

        def noted(stream: Iterator[Chunk]) -> Iterator[Chunk]:
            """Notes what the barrier's check needs of all pairs; at the end, sentences' keys."""
            for chunk in stream:
                if isinstance(barrier, FittedCheck):
                    counts.update(barrier.measure(chunk))
                elif at_end or isinstance(barrier, FirstCheck):
                    sides = map(chunk.digests, SIDES)
                    made = barrier.keys(chunk) if isinstance(barrier, FirstCheck) else sides
                    keys.append([np.rec.fromarrays((of, chunk.numbers), KEY) for of in made])
                yield chunk

        with contextlib.ExitStack() as stack:
            if (former := _shard(facts)) is None:
                about: dict[str, Any] = {"read": name, "held_out": [], "kinds": 0}
                self._cleaner.tallies.clear()
                part = Part(pair, "train", Count())
                shard = shards_of(self._source, pair, "train")[index]
                stream = part.read(self._recorded.noted(shard.pairs()))
            else:
                about = self.work.json(f"{former}.json")
                part = Part(pair, "train", Count.from_json(about["count"]))
                try:
                    stream = _read(self.work, former, stack)
                except FileNotFoundError:  # it led to another shard than this one
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
            about["files"], places = self._recorded.found()
            self.work.write(f"{name}.places", places.tobytes())
        about["held_out"] += self._learned(name)
        kinds = [np.concatenate(of_kind) for of_kind in zip(*keys, strict=True)]
        codes = split_direction(pair) if at_end else [pair] * len(kinds)
        about |= {"facts": facts, "kinds": len(kinds), "keys": self._keys(name, codes, kinds)}
        about |= {"count": part.count.as_json()}
        about["counts"] = [*counts.items()] if isinstance(barrier, FittedCheck) else None
        return about

    def _look(self, check: AnyCheck, facts: Sequence[Any], pairs: int, kinds: int) -> Check:
        """Returns the check of a barrier with what is known of all pairs.

        The shard has read so many `pairs`, and has so many `kinds` of keys.
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

    def _keys(self, name: str, names: Sequence[str], kinds: Sequence[Array]) -> list[list[int]]:
        """Writes the keys of a shard in buckets; returns [kind, bucket] of each file.

        The keys of each kind are compared within a pair or a language, `names`.
        """
        found = []
        for kind, (of, rows) in enumerate(zip(names, kinds, strict=False)):
            bucket = rows["key"] % self._job["buckets"][of]
            for number in np.unique(bucket).tolist():
                self.work.write(f"{name}.{kind}.{number}", rows[bucket == number].tobytes())
                found.append([kind, number])
        return found

    def _learned(self, name: str) -> list[list[str]]:
        """Writes what stages remember of this shard, and makes them forget it."""
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
        """Yields (unit, fact) for all shards of two languages: what a stage's counts say."""
        check = self._cleaner.checks(pair, "train")[0][self._stages[self._bounds[number + 1]]]
        assert isinstance(check, FittedCheck)
        value = check.fit(counts)
        for unit, (of, *_) in enumerate(self._job["units"]):
            if of == pair:
                yield unit, ("fitted", value)


class _Sentences(_Job):
    """Finds the sentences of clean shards that their language has before."""

    def segment(self, number: int, unit: int, given: Iterable[Fact]) -> Iterator[Made]:
        pair, _, name = self._job["units"][unit]
        codes, shard = split_direction(pair), name
        if number == 0:
            for kind, bucket in self.work.json(f"{shard}.json")["keys"]:
                yield "keys", (f"{codes[kind]} {bucket}", (unit, kind, f"{shard}.{kind}.{bucket}"))
        else:
            about = {"codes": codes, "shard": shard, "facts": sorted(given)}
            if self.work.json(f"{(name := _hash(about))}.json") is None:
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
    """Writes a file that is named by its content; returns its name."""
    name = f"{hashlib.sha256(content).hexdigest()}.{kind}"
    work.write(name, content)
    return name


def _shard(facts: Iterable[Any]) -> str | None:
    """Returns the shard of the segment before."""
    return next((fact[1] for fact in facts if fact[0] == "shard"), None)


def _again(work: Work, facts: Iterable[Any], kind: int) -> Array:
    """Returns the rows of a kind of keys of a shard that came before, in no order."""
    files = [fact[2] for fact in facts if fact[0] == "repeated" and fact[1] == kind]
    return np.concatenate([np.empty(0, _AGAIN), *(work.array(file, _AGAIN) for file in files)])


def _write(
    work: Work, name: str, stack: contextlib.ExitStack, part: Part, stream: Iterable[Chunk]
) -> None:
    """Writes the text of a shard, which is there when `stack` ends."""
    paths = [stack.enter_context(work.writing(f"{name}.{what}")) for what in _TEXT]
    *sides, numbers = (stack.enter_context(path.open("wb")) for path in paths)
    for chunk in stream:
        for file, side in zip(sides, SIDES, strict=True):
            file.write(sentence_lines(chunk.side(side), chunk, part.pair, part.split))
        chunk.numbers.astype(np.uint32).tofile(numbers)


def _read(work: Work, name: str, stack: contextlib.ExitStack) -> Iterator[Chunk]:
    """Returns the chunks of a shard. FileNotFoundError: it is not there."""
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
    """Does a step of a job; runners give a process several bundles at once."""
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


def program(place: str, name: str, *given: str) -> None:
    """Runs the pipeline of a job in a `Work`, in Beam's environment and with its options.

    Raises:
        InputError: Beam refuses an option; a line of the corpus is bad.
    """
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


def _options(given: Sequence[str]) -> Any:
    """Returns Beam's options. InputError: Beam refuses one."""
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


# The command.


@dataclasses.dataclass
class Engine:
    """Beam as `m4 data prepare` uses it.

    Attributes:
        runner: Its name in Beam without "Runner", in small letters: "direct", "dataflow".
        options: Options of Beam.
        workers: Processes of the direct runner, which change nothing.
        work: Where shards are kept until the corpus is there.
        progress: Called with (stage, done, total).
    """

    runner: str
    options: Sequence[str]
    workers: int
    work: Work = dataclasses.field(init=False)
    progress: Progress = lambda *_: None

    def __post_init__(self) -> None:
        self._python()

    def open(self, place: str) -> None:
        """Keeps shards in a folder or a bucket. InputError: it cannot be written to."""
        if self.runner == "dataflow" and not is_address(place):
            needs = "--runner=dataflow needs a bucket, gs://BUCKET/..."
            raise InputError(f"data_dir = {place}: {needs}")
        self.work = Work(place)
        self.work.write("started", b"")

    def clean(self, cleaner: Cleaner, source: Source, pairs: Sequence[str]) -> "Cleaned":
        """Returns the training text; its counts are in the cleaner's ledger.

        Args:
            cleaner: It has cleaned dev and test.
        """
        english = [pair for pair in pairs if pair.startswith("en-")]
        others = [pair for pair in pairs if pair not in english]
        buckets: Counter[str] = Counter()
        for pair in pairs:
            shards = shards_of(source, pair, "train")
            size = sum(shard.path.stat().length for shard in shards if shard.path is not None)
            buckets.update(dict.fromkeys((pair, *split_direction(pair)), size))
        buckets = Counter({of: 1 + size // _BUCKET_BYTES for of, size in buckets.items()})
        units = []
        # What is dropped of pairs with English counts for the others.
        for some in filter(None, (english, others) if _held_out(cleaner) else (pairs,)):
            job = self._job(cleaner, source, some, buckets)
            n = len(job["units"]) * (1 + len(job["barriers"]))
            names = self._run(job, lambda made, n=n: self.progress("text", min(len(made), n), n))
            for (pair, *_), name in zip(job["units"], names, strict=True):
                self._add(cleaner, pair, self.work.json(f"{name}.json"))
                units.append((pair, len(units), name))
        job = {"kind": "sentences", "units": units, "barriers": [0]}
        names = self._run(job, lambda made: self.progress("text", len(made), len(units)))
        return Cleaned(self.work, hasattr(source, "reading"), names)

    def _add(self, cleaner: Cleaner, pair: str, about: Mapping[str, Any]) -> None:
        """Adds what a worker counted and learned of a shard to the command's cleaner."""
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
        self, cleaner: Cleaner, source: Source, pairs: Sequence[str], buckets: Mapping[str, int]
    ) -> dict[str, Any]:
        held_out = {
            stage: _stored(self.work, _npz(opened.arrays()), "npz")
            for stage, opened in _held_out(cleaner).items()
        }
        text, cleaning = source.identity(), cleaner.cleaning
        by_pair = text.pop("by_pair", {})
        decides = [code_digest(), text, cleaning.identity(), held_out]
        units = []
        for pair in pairs:
            of = [decides, by_pair.get(pair), [buckets[of] for of in split_direction(pair)], pair]
            for index in range(len(shards_of(source, pair, "train"))):
                units.append((pair, index, _hash([*of, index])))
        stages = [*cleaner.opened]
        barriers = {
            stages.index(stage)
            for pair in pairs
            for stage, check in cleaner.checks(pair, "train")[0].items()
            if isinstance(check, FirstCheck | FittedCheck)
        }
        return {
            "kind": "text",
            "source": as_json(source, "CorpusSpec.source"),
            "cleaning": as_json(cleaning, "CorpusSpec.cleaning"),
            "checks": _hash(cleaning.identity()),
            "pairs": pairs,
            "held_out": held_out,
            "units": units,
            "buckets": buckets,
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
        decides = [code_digest(), given, ways, alpha]
        most = max(1, min(_SPANS, len(spans) // 64))
        by_file = ([*of_file] for _, of_file in groupby(spans, lambda span: span.path))
        groups = [of[start : start + most] for of in by_file for start in range(0, len(of), most)]
        units, sizes, there = [], {}, self.work.made()
        for group in groups:
            with group[0].path.open("rb") as file:
                file.seek(group[0].start)
                text = file.read(group[-1].stop - group[0].start)
            name = _hash([decides, hashlib.sha256(text).hexdigest(), *(s[1:] for s in group)])
            if name not in there:
                head = json.dumps([[s.path.name, *s[1:]] for s in group])
                self.work.write(f"{name}.text", head.encode() + b"\n" + text)
            units.append(name)
            sizes[name] = len(text)
        job = {"kind": "tokens", "units": units, "arrays": given, "ways": ways, "alpha": alpha}
        job["barriers"] = []
        total = sum(sizes.values())
        names = self._run(
            job, lambda made: self.progress("tokens", sum(sizes.get(m, 0) for m in made), total)
        )
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
            progress: Called with the names of the shards that were made.

        Raises:
            InputError: A mistake of the user, as on one machine.
            WorkersFailed: Anything else; where the log is.
        """
        job = {"m4": code_digest(), **job}
        name = _hash(json.dumps(job))
        self.work.write(f"{name}.job", json.dumps(job).encode())
        before = self.work.made()
        log = self.work.folder / "beam.log"
        command = [self._python(), "-c", _PROGRAM, self.work.place, name, *self._options()]
        env, said = self._environment(), ""
        for _ in range(_TRIES):
            with log.open("wb") as file:
                running = subprocess.Popen(command, stdout=file, stderr=file, env=env)
                try:
                    while running.poll() is None:
                        progress(self.work.made() - before)
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
        raise self._failure(said, log)

    def _failure(self, said: str, log: Path) -> Exception:
        mistake = r"(?:InputError|SettingError): (.*?)(?: \[while running .*)?$"
        if found := re.findall(mistake, said, re.M):
            return InputError(found[-1])
        if "Unable to fetch remote prism binary" in said:
            return InputError(
                "--runner=prism: Beam has no Prism here and cannot download it: give "
                "--beam_options=--prism_location=FILE"
            )
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "no word")
        return WorkersFailed(f"{self.runner}: {last} (what workers said: {log})")

    def _options(self) -> list[str]:
        direct = ["--direct_running_mode=multi_processing", f"--direct_num_workers={self.workers}"]
        own = direct if self.runner == "direct" and self.workers > 1 else []
        return [f"--runner={self.runner.capitalize()}Runner", *own, *self.options]

    def _python(self) -> str:
        """Returns the Python that has Beam."""
        if importlib.util.find_spec("apache_beam") is not None:
            return sys.executable
        python = Path(sys.prefix) / "share" / "m4" / "beam" / "bin" / "python"
        if not python.exists():
            needs = "needs Apache Beam, which is not installed: make beam"
            raise InputError(f"--runner={self.runner} {needs}")
        return str(python)

    def _environment(self) -> dict[str, str]:
        # Of this Python, not of the folders that it stands in: a checkout may be there, too.
        packages = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
        own = [p for p in sys.path if not p.startswith(tuple(packages))]
        return {**os.environ, "PYTHONPATH": os.pathsep.join([p or "." for p in own])}


class Cleaned:
    """Training text as shards, which are added to the files of a corpus.

    Args:
        knows: Whether the source knows files and lines.
        names: Shards of the last job, which finds sentences that came before.
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
            Number of pairs, and what the manifest says of the files that were read.
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
    """Numbers a language's sentences in the order in which they first come, 1.5 bits each.

    A bit of each pair that was read says whether its sentence is the first of its kind. The number
    of one is that of the bits before its own, which are counted for each word of 64.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Numbers nothing yet; `sizes` are the numbers of pairs of the shards."""
        self._starts = np.cumsum([0, *(size // 64 + 1 for size in sizes)])
        self._bits = np.zeros(self._starts[-1], "<u8")
        self._before = np.zeros(self._starts[-1], np.uint32)
        self._count = 0

    def add(self, shard: int, numbers: Ints, again: Array) -> tuple[U32, Mask]:
        """Returns [n] the number of each sentence of the next shard, and whether it is new.

        Args:
            numbers: Places of its pairs, from 1, in their order.
            again: Those that came before, and where (_AGAIN).
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


def cost(source: Source, cleaning: Cleaning, pairs: Sequence[str], price: float | None) -> str:
    """Returns what a corpus takes on many machines, measured on some pairs, cleaned here.

    Args:
        price: Dollars of a CPU hour.
    """
    shards = [shard for pair in pairs for shard in shards_of(source, pair, "train")]
    cleaner = Cleaner(cleaning, source, pairs, Path())
    sample: list[str] = []
    read = kinds = 0
    started = time.process_time()
    for pair in pairs[:: 1 + len(pairs) // _SAMPLED_LANGUAGES]:
        part = Part(pair, "train", Count())
        found = [*part.read(islice(source.pairs(pair, "train"), _SAMPLED_PAIRS))]
        sample += [f"{text}\n" for chunk in found for side in SIDES for text in chunk.side(side)]
        for stage, check in cleaner.checks(pair, "train")[0].items():
            if isinstance(check, FirstCheck) and found:
                kinds = max(kinds, len(check.keys(found[0])))
            look = alone(check, functools.partial(iter, found))
            found = [*part.checked(stage, look, iter(found))]
        read += part.count.read
    seconds = time.process_time() - started
    text = "".join(sample).encode()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "vocabulary.model"
        vocabulary.train(model, sample, 1000, [])
        tokenizer = RangeTokenizer([TokenArray("first", model, 128)], 1, None)
        started = time.process_time()
        tokenizer.of(TextRange(model, 0, len(text), True), text)
        seconds += time.process_time() - started
    packed = len(text) / max(len(zlib.compress(text)), 1)
    files = [shard.path for shard in shards if shard.path is not None]
    size = sum(path.stat().length * (packed if packing(path.name) else 1) for path in files)
    # A source without files does not say how much it has.
    about, number = ("about", size * read / max(len(text), 1)) if size else ("at least", read)
    hours = number * seconds / max(read, 1) / 3600
    dollars = "" if price is None else f", {hours * price:,.2f} dollars"
    keys = number * (kinds + len(SIDES)) * KEY.itemsize  # of pairs, and of both sentences

    def digits(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"

    shuffled = f"{digits(keys / 1e9)} GB of keys shuffled"
    return (
        f"{about} {number:,.0f} pairs: {digits(hours)} CPU hours ({read / max(seconds, 1e-9):,.0f} "
        f"pairs a CPU second, measured on {read:,}), {shuffled}{dollars}"
    )
