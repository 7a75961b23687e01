"""Prepares a corpus on Apache Beam: the stages of one machine, on shards, by any of Beam's runners.

Beam has an environment of its own (`make beam`), without JAX and TensorFlow. `Engine` writes a job
into a folder that all workers see, runs `program` there, and builds the corpus from the shards that
it leaves. A shard is named by the hash of its inputs: one that is there is not made again.

A file's text goes through the stages up to one that must know of other files, a barrier. There the
keys of the pairs are grouped, or counts are added; then the next segment of stages begins. Pairs
are numbered by file and line, and the first one wins, whoever comes first. Beam carries keys of 12
bytes a pair, and no text.
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
import tempfile
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.cache.origins import FILE, Recorded
from m4.data.cleaning import AnyCheck, Check, FirstCheck, FittedCheck, HeldOut
from m4.data.cleaning.chunk import Chunk, Digests
from m4.data.cleaning.clean import Cleaner, Cleaning, Part, alone, read_spool, write_spool
from m4.data.cleaning.ledger import Count
from m4.data.directions import SIDES
from m4.data.sources import Source, shards_of
from m4.data.sources.reading.files import packing
from m4.data.sources.reading.lines import Reading, Tally
from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.tokenizing import RangeTokenizer, TextRange, TokenArray, Tokenized
from m4.parallel.platform.hardware import code_digest
from m4.settings import InputError, SettingError, import_module
from m4.storage.files import remove
from m4.storage.objects import Objects, is_address

Progress = Callable[[str, int, int], None]
_BUCKET_BYTES = 1 << 28  # of text, whose keys one worker sorts in memory
_SPANS = 64  # most ranges of text in a shard of tokens
_TRIES = (
    3  # of a pipeline that lost a worker; runners of many machines try bundles again themselves
)
_POLL_SECONDS = 1.0
_SAMPLED_LANGUAGES, _SAMPLED_PAIRS = 20, 2000
_KEY_BYTES = 12
_PROGRAM = "import sys; from m4.data import beam; beam.program(*sys.argv[1:])"
_LOST = "Channel closed prematurely"


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
    if "items" in value:
        return {key: from_json(one) for key, one in value["items"]}
    kind = next(iter(value))
    module, _, name = value[kind].partition(":")
    found: Any = functools.reduce(getattr, name.split("."), import_module(module))
    given = {key: from_json(one) for key, one in value.get("given", {}).items()}
    return {"name": lambda: found, "partial": lambda: functools.partial(found, **given)}.get(
        kind, lambda: found(**given)
    )()


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
        part = self.folder / f".{os.getpid()}.{name}"
        yield part
        if self._objects is not None:
            self._objects.put(name, part)
            part.unlink()
        else:
            os.replace(part, self.folder / name)

    def write(self, name: str, content: bytes) -> None:
        with self.writing(name) as part:
            part.write_bytes(content)

    def get(self, name: str) -> Path:
        """Returns the path of a file that is there."""
        path = self.folder / name
        if self._objects is not None and not path.is_file():
            self._objects.download(name, path)
        return path

    def json(self, name: str) -> Any:
        """Returns the content of a file, or None if it is not there."""
        if self._objects is not None:
            content = self._objects.get(name)
        else:
            path = self.folder / name
            content = path.read_bytes() if path.is_file() else None
        return None if content is None else json.loads(content)

    def made(self) -> set[str]:
        """Returns the names of all shards."""
        names = self._objects.list() if self._objects is not None else os.listdir(self.folder)
        return {name[:-5] for name in names if name.endswith(".json") and name[0] != "."}

    def shared(self, path: Path) -> str:
        """Returns where workers read a file: its path, or the name of an object."""
        if self._objects is None:
            return os.path.abspath(path)
        name = f"{hashlib.sha256(path.read_bytes()).hexdigest()}{path.suffix}"
        self.write(name, path.read_bytes())
        return name

    def remove(self) -> None:
        if self._objects is not None:
            self._objects.delete(*self._objects.list())
        remove(self.folder)


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
            arrays = [TokenArray(*one) for one in job["arrays"]]
            self._arrays = [a._replace(vocabulary=self.work.get(str(a.vocabulary))) for a in arrays]
            self._tokenizer = RangeTokenizer(self._arrays, job["ways"], job["alpha"])
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
        self._held_out = {}
        for stage, file in job["held_out"].items():
            self._held_out[stage] = dict(np.load(self.work.get(file)))
            self._opened(stage).load(self._held_out[stage])

    def _opened(self, stage: str) -> HeldOut:
        opened = self._cleaner.opened[stage]
        assert isinstance(opened, HeldOut)
        return opened

    def segment(
        self, number: int, unit: int, given: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[str, Any]]:
        """Takes a shard of text through a segment of stages, or finds that this is done.

        Args:
            given: What it says of the segment before: ("shard", name), ("repeated", kind, numbers)
                of pairs with a key that an earlier pair has, ("fitted", value).

        Yields:
            (output of the step, element): shards (unit, fact), keys, counts, and metrics.
        """
        pair, index, identity = self._job["units"][unit]
        first, last = self._bounds[number : number + 2]
        checks, not_checked = self._cleaner.checks(pair, "train")
        facts = sorted(given)
        name = _hash([identity, number, facts])
        barrier = checks.get(self._stages[last]) if last < len(self._stages) else None
        met = _Met(barrier)
        if self.work.json(f"{name}.json") is None:
            if number == 0:
                about = {"count": Count().as_json(), "read": name, "held_out": []}
                self._cleaner.tallies.clear()
                part = Part(pair, "train", Count())
                shard = shards_of(self._source, pair, "train")[index]
                stream = part.read(self._recorded.noted(shard.pairs()))
            else:
                former = next(fact[1] for fact in facts if fact[0] == "shard")
                about = self.work.json(f"{former}.json")
                part = Part(pair, "train", Count.from_json(about["count"]))
                stream = read_spool(self.work.get(f"{former}.tsv"))
            for place in range(max(first, 0), last):
                stage = self._stages[place]
                if stage in checks:
                    stream = part.checked(stage, _look(checks[stage], facts), stream)
            with self.work.writing(f"{name}.tsv") as path:
                write_spool(path, part, met.watched(stream))
            if number == 0:
                part.leave_to_others(not_checked)
                tallies = self._cleaner.tallies.items()
                about["tallies"] = {file: [t.skipped, t.normalised] for file, t in tallies}
                about["files"], places = self._recorded.found()
                with self.work.writing(f"{name}.npy") as path, path.open("wb") as file:
                    np.save(file, places)
            about["held_out"] += self._learned(name)
            self._end(name, about | {"count": part.count.as_json()})
            if last == len(self._stages):
                for counter in ("dropped", "changed", "not_checked"):
                    for reason, pairs in getattr(part.count, counter).items():
                        yield "metrics", (f"{pair}: {counter}: {reason}", pairs)
                yield "metrics", (f"{pair}: kept", part.count.kept)
        elif barrier is not None:
            for _ in met.watched(read_spool(self.work.get(f"{name}.tsv"))):
                pass
        yield "shards", (unit, ("shard", name))
        yield from met.outputs(unit, pair, self._job["buckets"][pair])

    def _learned(self, name: str) -> list[list[str]]:
        """Writes what stages remember of this shard, and makes them forget it."""
        found = []
        for stage, before in self._held_out.items():
            now = self._opened(stage).arrays()
            new = {key: of for key, of in now.items() if len(of) > len(before.get(key, ()))}
            if new:
                found.append([stage, f"{name}.{len(found)}.npz"])
                with self.work.writing(found[-1][1]) as path, path.open("wb") as file:
                    np.savez(file, **new)  # type: ignore[arg-type]
                self._opened(stage).load(before)
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

    def tokens(self, unit: int) -> tuple[int, tuple[str, str]]:
        """Tokenizes some ranges of text, or finds that this is done."""
        identity, file, offset, spans = self._job["units"][unit]
        if self.work.json(f"{identity}.json") is None:
            arrays: dict[str, npt.NDArray[Any]] = {}
            with self.work.get(file).open("rb") as text:
                for number, (name, *span) in enumerate(spans):
                    span = TextRange(Path(name), *span)
                    text.seek(span.start - offset)
                    made = self._tokenizer.of(span, text.read(span.stop - span.start))
                    for store, ways in made.items():
                        for way, ragged in enumerate(ways):
                            arrays[f"{number} {store} {way} ids"] = ragged.ids
                            arrays[f"{number} {store} {way} lengths"] = ragged.lengths
            with self.work.writing(f"{identity}.npz") as path, path.open("wb") as out:
                np.savez(out, **arrays)  # type: ignore[arg-type]
            self._end(identity, {})
        return unit, ("shard", identity)


class _Met:
    """Collects the facts that a barrier's check needs of the pairs of a shard that reach it."""

    def __init__(self, check: AnyCheck | None) -> None:
        self._check = check
        self._counts: Counter[Any] = Counter()
        self._keys: list[list[npt.NDArray[np.uint64]]] = []
        self._numbers: list[npt.NDArray[np.int64]] = []

    def watched(self, stream: Iterator[Chunk]) -> Iterator[Chunk]:
        for chunk in stream:
            if isinstance(self._check, FittedCheck):
                self._counts.update(self._check.measure(chunk))
            elif isinstance(self._check, FirstCheck):
                self._keys.append(self._check.keys(chunk))
                self._numbers.append(chunk.numbers)
            yield chunk

    def outputs(self, unit: int, pair: str, buckets: int) -> Iterator[tuple[str, Any]]:
        if isinstance(self._check, FittedCheck):
            yield "counts", (pair, self._counts)
        if not self._keys:
            return
        numbers = np.concatenate(self._numbers).astype(np.uint32)
        for kind, keys in enumerate(map(np.concatenate, zip(*self._keys, strict=True))):
            yield "shards", (unit, ("repeated", kind, b""))  # so that each kind is there
            bucket = (keys % np.uint64(buckets)).astype(np.int64)
            order = np.argsort(bucket, kind="stable")
            ends = np.cumsum(np.bincount(bucket, minlength=buckets))
            for number, rows in enumerate(np.split(order, ends[:-1])):
                if len(rows):
                    value = unit, keys[rows].tobytes(), numbers[rows].tobytes()
                    yield "keys", (f"{pair} {kind} {number}", value)


def _look(check: AnyCheck, facts: Sequence[tuple[Any, ...]]) -> Check:
    """Returns the check of a barrier with what is known of all pairs."""
    if isinstance(check, FittedCheck):
        fitted = next(fact[1] for fact in facts if fact[0] == "fitted")
        return lambda chunk: check.judge(chunk, fitted)
    if not isinstance(check, FirstCheck):
        return check
    found: dict[int, list[npt.NDArray[np.uint64]]] = {}
    for kind, numbers in (fact[1:] for fact in facts if fact[0] == "repeated"):
        found.setdefault(kind, []).append(np.frombuffer(numbers, np.uint32).astype(np.uint64))
    repeated = [Digests(np.sort(np.concatenate(found[kind]))) for kind in sorted(found)]
    return lambda chunk: check.judge(
        chunk, [of_kind.contains(chunk.numbers.astype(np.uint64)) for of_kind in repeated]
    )


def _segment(element: tuple[int, Any], place: str, name: str, number: int) -> Iterator[Any]:
    from apache_beam.metrics import Metrics  # pyright: ignore[reportMissingImports]
    from apache_beam.pvalue import TaggedOutput  # pyright: ignore[reportMissingImports]

    unit, given = element
    for output, value in _opened(place, name).segment(number, unit, given):
        if output == "metrics":
            Metrics.counter("m4", value[0]).inc(value[1])
        else:
            yield TaggedOutput(output, value)


def _tokens(unit: int, place: str, name: str) -> tuple[int, Any]:
    return _opened(place, name).tokens(unit)


def _fitted(
    element: tuple[str, Counter[Any]], place: str, name: str, number: int
) -> Iterator[tuple[int, Any]]:
    yield from _opened(place, name).fitted(number, *element)


def _added(counters: Iterable[Counter[Any]]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for one in counters:
        total.update(one)
    return total


def _repeated(element: tuple[str, Iterable[tuple[int, bytes, bytes]]]) -> Iterator[Any]:
    """Yields (unit, fact): the pairs of a bucket with a key that an earlier pair has."""
    key, values = element
    kind = int(key.split(" ")[1])
    values = sorted(values)
    keys = np.concatenate([np.frombuffer(of, np.uint64) for _, of, _ in values])
    numbers = np.concatenate([np.frombuffer(of, np.uint32) for *_, of in values])
    # Stable: among equal keys the first shard, and there the first pair, comes first.
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    rows = np.sort(order[1:][keys[1:] == keys[:-1]])
    ends = np.cumsum([len(of) // 4 for *_, of in values])
    for (unit, *_), part in zip(
        values, np.split(rows, np.searchsorted(rows, ends[:-1])), strict=True
    ):
        if len(part):
            yield unit, ("repeated", kind, numbers[part].tobytes())


def _end(element: tuple[int, Iterable[tuple[int, tuple[Any, ...]]]], place: str, name: str) -> None:
    """Writes the names of a job's shards, in the order of its units."""
    names = [fact[1] for _, fact in sorted(element[1]) if fact[0] == "shard"]
    Work(place).write(f"{name}.done", json.dumps(names).encode())


def program(place: str, name: str, *given: str) -> None:
    """Runs a job's pipeline, in Beam's environment.

    Args:
        place: Folder or bucket of the job's `Work`.
        name: Name of the job.
        given: Options of Beam.

    Raises:
        InputError: Beam refuses an option; a line of the corpus is bad.
    """
    import apache_beam as beam  # pyright: ignore[reportMissingImports]

    options = _options(given)
    job = Work(place).json(f"{name}.job")
    units = range(len(job["units"]))
    with beam.Pipeline(options=options) as pipeline:
        started = pipeline | beam.Create(units) | beam.Reshuffle()
        if job["kind"] == "tokens":
            shards = started | "tokens" >> beam.Map(_tokens, place, name)
        else:
            ready = started | beam.Map(lambda unit: (unit, []))
            for number in range(len(job["barriers"]) + 1):
                made = ready | f"segment {number}" >> beam.FlatMap(
                    _segment, place, name, number
                ).with_outputs("shards", "keys", "counts")
                repeated = (
                    made.keys
                    | f"keys {number}" >> beam.GroupByKey()
                    | f"repeated {number}" >> beam.FlatMap(_repeated)
                )
                fitted = (
                    made.counts
                    | f"counts {number}" >> beam.CombinePerKey(_added)
                    | f"fitted {number}" >> beam.FlatMap(_fitted, place, name, number)
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
        price: Dollars of a CPU hour, for `cost`.
        work: Where shards are kept until the corpus is there.
        progress: Called with (stage, done, total).
    """

    runner: str
    options: Sequence[str]
    workers: int
    price: float | None = None
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

    def cost(self, source: Source, cleaning: Cleaning, pairs: Sequence[str]) -> str:
        """Returns what the corpus takes, measured on some pairs of it, which it cleans."""
        files = {pair: [s.path for s in shards_of(source, pair, "train")] for pair in pairs}
        cleaner = Cleaner(cleaning, source, pairs, Path())
        sample: list[str] = []
        read = kinds = 0
        started = time.process_time()
        for pair in pairs[:: 1 + len(pairs) // _SAMPLED_LANGUAGES]:
            part = Part(pair, "train", Count())
            found = [*part.read(islice(source.pairs(pair, "train"), _SAMPLED_PAIRS))]
            sample += [
                f"{text}\n" for chunk in found for side in SIDES for text in chunk.side(side)
            ]
            for stage, check in cleaner.checks(pair, "train")[0].items():
                if isinstance(check, FirstCheck) and found:
                    kinds = max(kinds, len(check.keys(found[0])))
                look = alone(check, functools.partial(iter, found))
                found = [*part.checked(stage, look, iter(found))]
            read += part.count.read
        seconds = time.process_time() - started
        text = "".join(sample).encode()
        with tempfile.TemporaryDirectory() as folder:
            path, model = Path(folder) / "text", Path(folder) / "vocabulary.model"
            path.write_bytes(text)
            vocabulary.train(model, sample, 1000, [])
            tokenizer = RangeTokenizer([TokenArray("first", model, 128)], 1, None)
            started = time.process_time()
            tokenizer(TextRange(path, 0, len(text), True))
            seconds += time.process_time() - started
        packed = len(text) / max(len(zlib.compress(text)), 1)
        size = sum(
            path.stat().length * (packed if packing(path.name) else 1)
            for of_pair in files.values()
            for path in of_pair
            if path is not None
        )
        number = size * read / max(len(text), 1)
        hours = number * seconds / max(read, 1) / 3600
        dollars = "" if self.price is None else f", {hours * self.price:,.2f} dollars"
        shuffled = f"{number * kinds * _KEY_BYTES / 1e9:,.3f} GB of keys shuffled"
        return (
            f"about {number:,.0f} pairs: {hours:,.3f} CPU hours ({read / max(seconds, 1e-9):,.0f} "
            f"pairs a CPU second, measured on {read:,}), {shuffled}{dollars}"
        )

    def clean(
        self,
        cleaner: Cleaner,
        cleaning: Cleaning,
        source: Source,
        pairs: Sequence[str],
    ) -> "Cleaned":
        """Returns the training text; its counts are in the cleaner's ledger.

        Args:
            cleaner: It has cleaned dev and test.
        """
        learns = any(isinstance(opened, HeldOut) for opened in cleaner.opened.values())
        english = [pair for pair in pairs if pair.startswith("en-")]
        others = [pair for pair in pairs if pair not in english]
        found = Cleaned(self.work, pairs)
        # What is dropped of pairs with English counts for the others.
        for some in (english, others) if learns else (pairs,):
            if some:
                self._clean(found, cleaner, cleaning, source, some)
        return found

    def _clean(
        self,
        found: "Cleaned",
        cleaner: Cleaner,
        cleaning: Cleaning,
        source: Source,
        pairs: Sequence[str],
    ) -> None:
        held_out = {}
        for stage, opened in cleaner.opened.items():
            if isinstance(opened, HeldOut):
                content = io.BytesIO()
                np.savez(content, **opened.arrays())  # type: ignore[arg-type]
                held_out[stage] = f"{hashlib.sha256(content.getvalue()).hexdigest()}.npz"
                self.work.write(held_out[stage], content.getvalue())
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
        job = {
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
        total = len(units) * (1 + len(barriers))
        names = self._run(job, lambda made: self.progress("text", min(len(made), total), total))
        for (pair, *_), name in zip(units, names, strict=True):
            about = found.add(pair, name)
            tallies = {}
            for file, (skipped, normalised) in about["tallies"].items():
                tallies[file] = Tally(Reading("", "skip", 0), file, file, "")
                tallies[file].skipped.update(skipped)
                tallies[file].normalised.update(normalised)
            cleaner.add(pair, "train", Count.from_json(about["count"]), tallies)
            for stage, file in about["held_out"]:
                opened = cleaner.opened[stage]
                assert isinstance(opened, HeldOut)
                arrays = opened.arrays()
                for key, new in np.load(self.work.get(file)).items():
                    arrays[key] = np.union1d(arrays[key], new) if key in arrays else new
                opened.load(arrays)

    def tokenized(
        self,
        spans: Sequence[TextRange],
        arrays: Sequence[TokenArray],
        ways: int,
        alpha: float | None,
    ) -> Iterator[Tokenized]:
        """Yields the ranges' results in their order, as `tokenizing.tokenized` does."""
        vocabularies = {path: self.work.shared(path) for path in {a.vocabulary for a in arrays}}
        models = [hashlib.sha256(a.vocabulary.read_bytes()).hexdigest() for a in arrays]
        given = [[*a._replace(vocabulary=Path())] for a in arrays]
        decides = [code_digest(), models, repr(given), ways, alpha]
        most = max(1, min(_SPANS, len(spans) // 64))
        groups: list[list[TextRange]] = []
        for span in spans:
            if groups and len(groups[-1]) < most and groups[-1][-1].path == span.path:
                groups[-1].append(span)
            else:
                groups.append([span])
        units = []
        for group in groups:
            first, last = group[0], group[-1]
            text = _bytes_of(first.path, first.start, last.stop)
            key = _hash([decides, hashlib.sha256(text).hexdigest(), *(s[1:] for s in group)])
            units.append([key, *self._place_of(key, first, text), group])
        job = {
            "kind": "tokens",
            "units": [
                [key, file, offset, [[s.path.name, *s[1:]] for s in group]]
                for key, file, offset, group in units
            ],
            "arrays": [[*a._replace(vocabulary=vocabularies[a.vocabulary])] for a in arrays],
            "ways": ways,
            "alpha": alpha,
        }
        sizes = {key: group[-1].stop - group[0].start for key, *_, group in units}

        def tell(made: set[str]) -> None:
            done = sum(sizes[key] for key in made & sizes.keys())
            self.progress("tokens", done, sum(sizes.values()))

        names = self._run(job, tell)
        for group, name in zip(groups, names, strict=True):
            with np.load(self.work.get(f"{name}.npz")) as found:
                for number, span in enumerate(group):
                    yield {
                        store: [
                            Ragged(*(found[f"{number} {store} {way} {f}"] for f in Ragged._fields))
                            for way in range(ways if span.train else 1)
                        ]
                        for store in span.stores
                    }

    def _place_of(self, key: str, first: TextRange, text: bytes) -> tuple[str, int]:
        """Returns where workers read the text of a group, and the offset of its file."""
        if not is_address(self.work.place):
            return os.path.abspath(first.path), 0
        self.work.write(f"{key}.text", text)
        return f"{key}.text", first.start

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

    def __init__(self, work: Work, pairs: Sequence[str]) -> None:
        self._work = work
        self._shards: dict[str, list[tuple[str, Any]]] = {pair: [] for pair in pairs}

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
                places = np.load(self._work.get(f"{about['read']}.npy"))
                own = [self._files.setdefault(file, len(self._files)) for file in about["files"]]
                self._places = np.array([*own, 0])[places // FILE] * FILE + places % FILE
            yield from read_spool(self._work.get(f"{name}.tsv"))

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


def _bytes_of(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
