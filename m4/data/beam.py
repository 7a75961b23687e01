"""Prepares a corpus on Apache Beam: the stages of one machine, on shards, by any of Beam's runners.

Beam has an environment of its own (`make beam`), without JAX and TensorFlow. `Engine` writes a job
into a folder that all workers see, runs `program` there, and builds the corpus from the shards that
it leaves. A shard is named by the hash of its inputs: one that is there is not made again.

A file's text goes through the stages up to one that must know of other files, a barrier. There the
keys of the pairs are compared, or counts are added; then the next segment of stages begins. Pairs
are numbered by file and line, and the first one wins, whoever comes first. Text and keys, of 12
bytes a pair, are files; Beam carries their names, and counts.
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
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.cache.origins import FILE, Recorded
from m4.data.cleaning import AnyCheck, Check, FirstCheck, FittedCheck, HeldOut
from m4.data.cleaning.chunk import Chunk, Digests
from m4.data.cleaning.clean import Cleaner, Cleaning, Part, read_spool, write_spool
from m4.data.cleaning.ledger import Count
from m4.data.sources import Source, shards_of
from m4.data.sources.reading.lines import Reading, Tally
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.tokenizing import RangeTokenizer, TextRange, TokenArray, Tokenized
from m4.parallel.platform.hardware import code_digest
from m4.settings import InputError, SettingError, import_module
from m4.storage.objects import is_address
from m4.storage.work import Work

Progress = Callable[[str, int, int], None]
_BUCKET_BYTES = 1 << 28  # of text, whose keys one worker sorts in memory
_SPANS = 64  # most ranges of text in a shard of tokens
# Of a pipeline that lost a worker; runners of many machines try bundles again themselves.
_TRIES = 3
_POLL_SECONDS = 1.0
KEY = np.dtype([("key", "<u8"), ("number", "<u4")])  # of a pair, and its place in its shard
_PROGRAM = "import sys; from m4.data import beam; beam.program(*sys.argv[1:])"
_LOST = "Channel closed prematurely"
_TURN = threading.Lock()


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
    if isinstance(value, Mapping):
        return {"items": [[key, as_json(one, setting)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        return [as_json(one, setting) for one in value]
    if isinstance(value, functools.partial):
        given = {key: as_json(one, setting) for key, one in value.keywords.items()}
        return {"partial": _name(value.func, setting), "given": given}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        given = {name: as_json(getattr(value, name), setting) for name in fields}
        return {"made": _name(type(value), setting), "given": given}
    return {"name": _name(value, setting)}


def from_json(value: Any) -> Any:
    """Returns what `as_json` described."""
    if isinstance(value, list):
        return tuple(map(from_json, value))
    if not isinstance(value, dict):
        return value
    kind, name = next(iter(value.items()))
    if kind == "items":
        return {key: from_json(one) for key, one in name}
    module, _, name = name.partition(":")
    found: Any = functools.reduce(getattr, name.split("."), import_module(module))
    given = {key: from_json(one) for key, one in value.get("given", {}).items()}
    if kind == "partial":
        return functools.partial(found, **given)
    return found(**given) if kind == "made" else found


def _name(value: Any, setting: str) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    if "<" in name or module in (None, "__main__"):
        allowed = "a dataclass or a function of a module, which workers import (or --runner=local)"
        raise SettingError(setting, value, allowed)
    return f"{module}:{name}"


# Workers.


@functools.lru_cache(1)
def _opened(place: str, name: str) -> "_Job":
    return _Job(place, name)


class _Job:
    """A job as a worker has opened it."""

    def __init__(self, place: str, name: str) -> None:
        self.work = Work(place)
        self._job = job = self.work.json(f"{name}.job")
        if (here := code_digest()) != job["m4"]:
            raise InputError(
                f"a worker has another m4 ({here[:12]}) than the command ({job['m4'][:12]}): "
                "install the same one there"
            )
        if job["kind"] == "tokens":
            self._kept = contextlib.ExitStack()  # vocabularies are read when they are first used
            arrays = [TokenArray(*one) for one in job["arrays"]]
            names = {str(array.vocabulary) for array in arrays}
            files = {name: self._kept.enter_context(self.work.reading(name)) for name in names}
            arrays = [a._replace(vocabulary=files[str(a.vocabulary)]) for a in arrays]
            self._tokenizer = RangeTokenizer(arrays, job["ways"], job["alpha"])
            return
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

    def segment(
        self, number: int, unit: int, given: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[str, Any]]:
        """Takes a shard of text through a segment of stages, or finds that this is done.

        Args:
            given: What it says of the segment before: ("shard", name), ("repeated", kind, file) of
                pairs with a key that an earlier pair has, ("fitted", value).

        Yields:
            (output of the step, element): shards (unit, fact), keys, counts, and metrics.
        """
        pair, index, identity = self._job["units"][unit]
        facts = sorted(given)
        name = _hash([identity, number, facts])
        about = self.work.json(f"{name}.json")
        if about is None:
            about = self._made(name, number, pair, index, facts)
            self._end(name, about)
        yield "shards", (unit, ("shard", name))
        for kind, bucket in about["keys"]:
            yield "keys", (f"{pair} {kind} {bucket}", (unit, f"{name}.{kind}.{bucket}"))
        if about["counts"] is not None:
            yield "counts", (pair, Counter(dict(about["counts"])))
        if number == len(self._bounds) - 2:
            count = about["count"]
            for counter in ("dropped", "changed", "not_checked"):
                for reason, pairs in count.get(counter, {}).items():
                    yield "metrics", (f"{pair}: {counter}: {reason}", pairs)
            yield "metrics", (f"{pair}: kept", count["kept"])

    def _made(
        self, name: str, number: int, pair: str, index: int, facts: Sequence[tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Writes a shard; returns what is known of it."""
        first, last = self._bounds[number : number + 2]
        checks, not_checked = self._cleaner.checks(pair, "train")
        barrier = checks.get(self._stages[last]) if last < len(self._stages) else None
        met = _Met(barrier)
        former = next((fact[1] for fact in facts if fact[0] == "shard"), None)
        with contextlib.ExitStack() as stack:
            if former is None:
                about: dict[str, Any] = {"read": name, "held_out": [], "kinds": 0}
                self._cleaner.tallies.clear()
                part = Part(pair, "train", Count())
                shard = shards_of(self._source, pair, "train")[index]
                stream = part.read(self._recorded.noted(shard.pairs()))
            else:
                about = self.work.json(f"{former}.json")
                part = Part(pair, "train", Count.from_json(about["count"]))
                stream = read_spool(stack.enter_context(self.work.reading(f"{former}.tsv")))
            for stage in self._stages[max(first, 0) : last]:
                if stage in checks:
                    look = self._look(checks[stage], facts, about["kinds"])
                    stream = part.checked(stage, look, stream)
            path = stack.enter_context(self.work.writing(f"{name}.tsv"))
            write_spool(path, part, met.watched(stream))
        if former is None:
            part.leave_to_others(not_checked)
            tallies = self._cleaner.tallies.items()
            about["tallies"] = {file: [t.skipped, t.normalised] for file, t in tallies}
            about["files"], places = self._recorded.found()
            self.work.write(f"{name}.places", places.tobytes())
        about["held_out"] += self._learned(name)
        keys, counts = met.keys(), [*met.counts.items()]
        about |= {"kinds": len(keys), "keys": self._keys(name, pair, keys)}
        about |= {"count": part.count.as_json()}
        about["counts"] = counts if isinstance(barrier, FittedCheck) else None
        return about

    def _look(self, check: AnyCheck, facts: Sequence[tuple[Any, ...]], kinds: int) -> Check:
        """Returns the check of a barrier with what is known of all pairs.

        Args:
            kinds: Number of kinds of keys.
        """
        if isinstance(check, FittedCheck):
            fitted = next(fact[1] for fact in facts if fact[0] == "fitted")
            return lambda chunk: check.judge(chunk, fitted)
        if not isinstance(check, FirstCheck):
            return check
        found = [[np.zeros(0, np.uint32)] for _ in range(kinds)]
        for kind, file in (fact[1:] for fact in facts if fact[0] == "repeated"):
            found[kind].append(self.work.array(file, np.uint32))
        repeated = [Digests(np.sort(np.concatenate(of)).astype(np.uint64)) for of in found]
        return lambda chunk: check.judge(
            chunk, [of_kind.contains(chunk.numbers.astype(np.uint64)) for of_kind in repeated]
        )

    def _keys(self, name: str, pair: str, kinds: Sequence[npt.NDArray[Any]]) -> list[list[int]]:
        """Writes the keys of a shard's pairs in buckets; returns [kind, bucket] of each file."""
        found = []
        for kind, rows in enumerate(kinds):
            bucket = rows["key"] % self._job["buckets"][pair]
            for number in np.unique(bucket).tolist():
                self.work.write(f"{name}.{kind}.{number}", rows[bucket == number].tobytes())
                found.append([kind, number])
        return found

    def repeated(self, key: str, files: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
        """Yields (unit, fact): the pairs of a bucket with a key that an earlier pair has."""
        files, kind = sorted(files), int(key.split(" ")[1])
        rows = [self.work.array(file, KEY) for _, file in files]
        every = np.concatenate(rows)
        # Stable: among equal keys the first shard, and there the first pair, comes first.
        order = np.argsort(every["key"], kind="stable")
        keys, again = every["key"][order], np.zeros(len(every), bool)
        again[order[1:][keys[1:] == keys[:-1]]] = True
        ends = np.cumsum([*map(len, rows)])[:-1]
        for (unit, _), numbers, of in zip(
            files, np.split(every["number"], ends), np.split(again, ends), strict=True
        ):
            if of.any():
                content = numbers[of].tobytes()
                file = f"{hashlib.sha256(content).hexdigest()}.numbers"
                self.work.write(file, content)
                yield unit, ("repeated", kind, file)

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

    def _end(self, name: str, about: Mapping[str, Any]) -> None:
        self.work.write(f"{name}.json", json.dumps(about).encode())

    def fitted(self, number: int, pair: str, counts: Counter[Any]) -> Iterator[tuple[int, Any]]:
        """Yields (unit, fact) for all shards of two languages: what a stage's counts say."""
        check = self._cleaner.checks(pair, "train")[0][self._stages[self._bounds[number + 1]]]
        assert isinstance(check, FittedCheck)
        value = check.fit(counts)
        for unit, (of, *_) in enumerate(self._job["units"]):
            if of == pair:
                yield unit, ("fitted", value)

    def tokens(self, unit: int, _given: Iterable[Any]) -> Iterator[tuple[int, tuple[str, str]]]:
        """Tokenizes some ranges of text, or finds that this is done."""
        name, spans = self._job["units"][unit]
        if self.work.json(f"{name}.json") is None:
            arrays: dict[str, npt.NDArray[Any]] = {}
            text = self.work.array(f"{name}.text", np.uint8).tobytes()
            for number, (path, *of) in enumerate(spans):
                span = TextRange(Path(path), *of)
                start = span.start - spans[0][1]
                made = self._tokenizer.of(span, text[start : start + span.stop - span.start])
                for store, ways in made.items():
                    for way, ragged in enumerate(ways):
                        arrays[f"{number} {store} {way} ids"] = ragged.ids
                        arrays[f"{number} {store} {way} lengths"] = ragged.lengths
            self.work.write(f"{name}.npz", _npz(arrays))
            self._end(name, {})
        yield unit, ("shard", name)


def _held_out(cleaner: Cleaner) -> dict[str, HeldOut]:
    return {name: of for name, of in cleaner.opened.items() if isinstance(of, HeldOut)}


def _npz(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


class _Met:
    """Collects what a barrier's check needs of the pairs of a shard that reach it."""

    def __init__(self, check: AnyCheck | None) -> None:
        self._check = check
        self.counts: Counter[Any] = Counter()
        self._rows: list[list[npt.NDArray[Any]]] = []

    def watched(self, stream: Iterator[Chunk]) -> Iterator[Chunk]:
        for chunk in stream:
            if isinstance(self._check, FittedCheck):
                self.counts.update(self._check.measure(chunk))
            elif isinstance(self._check, FirstCheck):
                self._rows.append([])
                for keys in self._check.keys(chunk):
                    rows = np.empty(len(chunk), KEY)
                    rows["key"], rows["number"] = keys, chunk.numbers
                    self._rows[-1].append(rows)
            yield chunk

    def keys(self) -> list[npt.NDArray[Any]]:
        """Returns keys and numbers of all pairs, by kind of key."""
        return [np.concatenate(of_kind) for of_kind in zip(*self._rows, strict=True)]


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


def _end(element: tuple[int, Iterable[tuple[int, tuple[Any, ...]]]], place: str, name: str) -> None:
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
        if job["kind"] == "tokens":
            shards = ready | "tokens" >> beam.FlatMap(_do, place, name, "tokens")
        else:
            for number in range(len(job["barriers"]) + 1):
                made = ready | f"segment {number}" >> beam.FlatMap(
                    _segment, place, name, "segment", number
                ).with_outputs("shards", "keys", "counts")
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
                shards = made.shards
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
            options.get_all_options()
    except SystemExit as error:
        raise InputError(f"--beam_options: {said.getvalue().splitlines()[-1]}") from error
    finally:
        logging.getLogger().removeHandler(handler)
    if unknown := re.search(r"unparseable args: \[(.*)\]", log.getvalue()):
        raise InputError(f"--beam_options: Beam has no option {unknown[1]}")
    runner = options.get_all_options()["runner"]
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
            raise InputError(
                f"data_dir = {place}: --runner=dataflow needs a bucket, gs://BUCKET/..."
            )
        self.work = Work(place)
        self.work.write("started", b"")

    def clean(
        self, cleaner: Cleaner, cleaning: Cleaning, source: Source, pairs: Sequence[str]
    ) -> "Cleaned":
        """Returns the training text; its counts are in the cleaner's ledger.

        Args:
            cleaner: It has cleaned dev and test.
        """
        english = [pair for pair in pairs if pair.startswith("en-")]
        others = [pair for pair in pairs if pair not in english]
        found = Cleaned(self.work)
        # What is dropped of pairs with English counts for the others.
        for some in filter(None, (english, others) if _held_out(cleaner) else (pairs,)):
            job = self._job(cleaner, cleaning, source, some)
            total = len(job["units"]) * (1 + len(job["barriers"]))
            names = self._run(
                job, lambda made, n=total: self.progress("text", min(len(made), n), n)
            )
            for (pair, *_), name in zip(job["units"], names, strict=True):
                self._add(cleaner, pair, found.add(pair, name))
        return found

    def _add(self, cleaner: Cleaner, pair: str, about: Mapping[str, Any]) -> None:
        """Adds what a worker counted and learned of a shard to the command's cleaner."""
        tallies = {}
        for file, (skipped, normalised) in about["tallies"].items():
            tallies[file] = Tally(Reading("", "skip", 0), file, file, "")
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
        self, cleaner: Cleaner, cleaning: Cleaning, source: Source, pairs: Sequence[str]
    ) -> dict[str, Any]:
        held_out = {}
        for stage, opened in _held_out(cleaner).items():
            content = _npz(opened.arrays())
            held_out[stage] = f"{hashlib.sha256(content).hexdigest()}.npz"
            self.work.write(held_out[stage], content)
        text = source.identity()
        by_pair = text.pop("by_pair", {})
        decides = [code_digest(), text, cleaning.identity(), held_out]
        units, buckets = [], {}
        for pair in pairs:
            shards = shards_of(source, pair, "train")
            size = sum(shard.path.stat().length for shard in shards if shard.path is not None)
            buckets[pair] = 1 + size // _BUCKET_BYTES
            for index in range(len(shards)):
                units.append((pair, index, _hash([decides, by_pair.get(pair), pair, index])))
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
        files = {a.vocabulary: a.vocabulary.read_bytes() for a in arrays}
        names = {path: f"{hashlib.sha256(of).hexdigest()}.model" for path, of in files.items()}
        for path, content in files.items():
            self.work.write(names[path], content)
        given = [[*a._replace(vocabulary=names[a.vocabulary])] for a in arrays]  # type: ignore
        decides = [code_digest(), given, ways, alpha]
        most = max(1, min(_SPANS, len(spans) // 64))
        groups: list[list[TextRange]] = []
        for span in spans:
            if groups and len(groups[-1]) < most and groups[-1][-1].path == span.path:
                groups[-1].append(span)
            else:
                groups.append([span])
        units = []
        for group in groups:
            with group[0].path.open("rb") as file:
                file.seek(group[0].start)
                text = file.read(group[-1].stop - group[0].start)
            name = _hash([decides, hashlib.sha256(text).hexdigest(), *(s[1:] for s in group)])
            self.work.write(f"{name}.text", text)
            units.append([name, [[s.path.name, *s[1:]] for s in group]])
        job = {"kind": "tokens", "units": units, "arrays": given, "ways": ways, "alpha": alpha}
        sizes = {name: group[-1][2] - group[0][1] for name, group in units}
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
        for attempt in range(1, _TRIES + 1):
            with log.open("wb") as file:
                running = subprocess.Popen(
                    command, stdout=file, stderr=file, env=self._environment()
                )
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
            if _LOST not in said or attempt == _TRIES:
                break
        raise self._failure(said, log)

    def _failure(self, said: str, log: Path) -> Exception:
        found = re.findall(
            r"(?:InputError|SettingError): (.*?)(?: \[while running .*)?$", said, re.M
        )
        if found:
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
            raise InputError(
                f"--runner={self.runner} needs Apache Beam, which is not installed: make beam"
            )
        return str(python)

    def _environment(self) -> dict[str, str]:
        packages = sys.prefix, sys.base_prefix
        optional = str(Path(sys.prefix) / "share")  # such as the identifier of languages
        own = [p for p in sys.path if p.startswith(optional) or not p.startswith(packages)]
        return {**os.environ, "PYTHONPATH": os.pathsep.join([p or "." for p in own])}


class Cleaned:
    """Training text as shards, read as from a `Cleaner` and its `Recorded` source."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._shards: dict[str, list[tuple[str, Any]]] = defaultdict(list)

    def add(self, pair: str, name: str) -> Any:
        """Adds a shard of two languages; returns what is known of it."""
        about = self._work.json(f"{name}.json")
        self._shards[pair].append((name, about))
        return about

    def pairs(self, pair: str, split: str) -> Iterator[Chunk]:
        """Yields the chunks of two languages."""
        self._files: dict[str, int] = {}
        for name, about in self._shards[pair]:
            self.knows = about["files"] is not None
            if self.knows:
                places = self._work.array(f"{about['read']}.places", np.int64)
                own = [self._files.setdefault(file, len(self._files)) for file in about["files"]]
                self._places = np.array([*own, 0])[places // FILE] * FILE + places % FILE
            with self._work.reading(f"{name}.tsv") as path:
                yield from read_spool(path)

    def keep(self, numbers: npt.NDArray[np.int64], path: Path) -> None:
        """Writes the origins of pairs of the last chunk's shard."""
        if self.knows:
            with path.open("ab") as file:
                self._places[numbers - 1].tofile(file)

    def end(self, path: Path) -> dict[str, list[str]]:
        """Returns what the manifest says of the files that were read."""
        if not self.knows:
            return {}
        path.touch()
        return {"files": [*self._files]}
