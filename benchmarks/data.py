"""Measures the way from text to batches: `python benchmarks/data.py [--folder FOLDER]`.

Text of 100 languages, from a folder of <lang>.{train,dev,test}.tsv files or else from the embedded
corpus, becomes a cache; then, each in a separate process:

  start    from nothing to the first batch: 20 and 200 directions; with Numba's cache and without
  feed     batches in a row: packed, one pair a row; of the text, and of made-up arrays
           with sentences as long as news; of --gigabytes of them, when that is given
  seqio    seqio's own mixture of the same cache, packed by its feature converter
  shares   a million draws against their theory
  resume   random steps, each by a fresh stream on 1, 2 and 8 hosts, against one stream

It prints a JSON line per measurement, and a table at the end. Tokens are ids of sources and targets
without padding. CPU seconds are of all threads; rates are per CPU second, so on one core.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import corpora
from process import Meter, memory

PARTS = ("start", "feed", "seqio", "shares", "resume")
LENGTH = 128
HOSTS = (1, 2, 8)


def tokens_in(batch: dict[str, Any]) -> list[int]:
    """Returns the number of source and target ids."""
    return [int((batch[f"{side}_segment_ids"] > 0).sum()) for side in ("encoder", "decoder")]


def start(
    folder: str, directions: int, jobs: bool, text: str, languages: int, pieces: int
) -> dict[str, Any]:
    """Measures from the beginning of this process to the first batch.

    With `jobs`, it starts like `m4 train`, with JAX and a comparison of the cache's settings.
    """
    if jobs:
        importlib.import_module("m4.jobs")
    from m4.data.cache.cache import Cache
    from m4.data.corpus import CorpusSpec
    from m4.data.stream.stream import Stream

    imported = time.process_time()
    if jobs:
        source, codes = corpora.text(text, languages)
        cache = CorpusSpec(source, codes, vocabulary_size=pieces).build(Path(folder).parent)
    else:
        cache = Cache(folder)
    opened = time.process_time()
    stream = Stream(cache, cache.directions[:directions], batch_rows=64)
    stream.batch(0)
    seconds = time.time() - float(os.environ["STARTED"])
    cpu = time.process_time()
    return {
        "directions": len(stream.directions),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "import_cpu_seconds": imported,
        "open_cpu_seconds": opened - imported,
        **memory(),
    }


def feed(folder: str, rows: int, layout: str, seconds: float, drop: bool = False) -> dict[str, Any]:
    """Measures consecutive batches for this many CPU seconds, in whole windows of steps."""
    import numpy as np

    from m4.data.cache.cache import Cache
    from m4.data.stream.stream import Stream

    cache = Cache(folder)
    if drop:  # drops the system's copy of the files, to read from disk
        for path in Path(folder).glob("train.*.npy"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    stream = Stream(
        cache, batch_rows=rows, source_length=LENGTH, target_length=LENGTH, layout=layout
    )
    first = stream.span_steps  # a span to warm up
    for step in range(first):
        stream.batch(step)
    meter, slowest = Meter(), 0.0
    seen, places, step = np.zeros(2, int), 0, first
    while meter.spent["cpu_seconds"] < seconds or step % first:
        meter.begin()
        batch = stream.batch(step)
        slowest = max(slowest, meter.end()["seconds"])
        seen += tokens_in(batch)
        places += batch["encoder_segment_ids"].size
        step += 1
    spent = meter.report()
    began = time.process_time()
    stream.batch(10**9)
    pairs = sum(stream.examples_seen(step).values()) - sum(stream.examples_seen(first).values())
    return {
        "layout": layout,
        "rows": rows,
        "tokens_per_cpu_second": round(seen.sum() / spent["cpu_seconds"]),
        "tokens_per_second": round(seen.sum() / spent["seconds"]),
        # As if no other work had the cores.
        "tokens_per_own_second": round(seen.sum() / (spent["seconds"] - spent["queued_seconds"])),
        **spent,
        "filled_sources": seen[0] / places,
        "filled_targets": seen[1] / places,
        "filled": seen.sum() / 2 / places,
        "tokens": int(seen.sum()),
        "pairs": pairs,
        "slowest_batch_ms": 1e3 * slowest,
        "seek_cpu_ms": 1e3 * (time.process_time() - began),
        "gigabytes": sum(path.stat().st_size for path in Path(folder).glob("train.*.npy")) / 1e9,
        **memory(),
    }


def seqio(folder: str, rows: int, seconds: float) -> dict[str, Any]:
    """Reads the mixture of all directions, tokenized, shuffled and packed as T5X does it.

    It measures for `seconds` of CPU time, after as many to warm up.
    """
    from m4.data import tasks
    from m4.data.cache.cache import Cache

    tasks.register_cache(Cache(folder))
    lengths = {"inputs": LENGTH, "targets": LENGTH}
    converter: Any = tasks.seqio.EncDecFeatureConverter(pack=True)
    mixture = tasks.seqio.get_mixture_or_task("m4.english_centric")
    dataset = converter(
        mixture.get_dataset(lengths, split="train", shuffle=True, num_epochs=None, seed=0), lengths
    )
    batches = dataset.batch(rows, drop_remainder=True).prefetch(2).as_numpy_iterator()
    next(batches)
    first, first_cpu = time.time() - float(os.environ["STARTED"]), time.process_time()
    # By CPU time, as a busy machine gives less: the buffers fill, then the same time is measured.
    while time.process_time() - first_cpu < seconds:
        next(batches)
    began, cpu, seen, places = time.perf_counter(), time.process_time(), 0, 0
    while time.process_time() - cpu < seconds:
        batch = next(batches)
        seen += sum(tokens_in(batch))
        places += 2 * batch["encoder_segment_ids"].size
    clock, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {
        "layout": "packed",
        "rows": rows,
        "seconds": first,
        "cpu_seconds": first_cpu,
        "tokens_per_cpu_second": round(seen / cpu),
        "tokens_per_second": round(seen / clock),
        "filled": seen / places,
        **memory(),
    }


def shares(folder: str) -> dict[str, Any]:
    """Measures each direction's distance from its share after a million pairs, in sigmas."""
    import numpy as np

    from m4.data.cache.cache import Cache
    from m4.data.samplers.temperature import temperature
    from m4.data.stream.draws import Draws

    sizes = Cache(folder).sizes()
    rates = np.array(list(temperature(sizes).values()))
    draws = Draws(list(sizes), list(sizes.values()), rates.tolist(), seed=0)
    number = 10**6
    counts = np.bincount(draws.draw(0, number).directions, minlength=len(sizes))
    off = np.abs(counts - rates * number) / np.sqrt(rates * (1 - rates) * number)
    return {"draws": number, "directions": len(sizes), "largest_deviation_sigma": float(off.max())}


def resume(folder: str, steps: int, layout: str) -> dict[str, Any]:
    """Counts steps whose batch differs between one stream and a new stream on every step.

    The new streams give the parts of 1, 2 and 8 hosts.
    """
    import numpy as np

    from m4.data.cache.cache import Cache
    from m4.data.stream.stream import Stream

    cache, different = Cache(folder), 0
    options: dict[str, Any] = {"batch_rows": 64, "layout": layout}
    whole = Stream(cache, **options)
    for step in np.random.default_rng(0).integers(0, 10**6, steps).tolist():
        wanted, fresh = whole.batch(step), Stream(cache, **options)
        # A stream is a function of its arguments: hosts differ only in the requested part.
        equal = True
        for hosts in HOSTS:
            parts = [fresh.batch(step, (host, hosts)) for host in range(hosts)]
            equal &= all(
                np.array_equal(np.concatenate([part[key] for part in parts]), array)
                for key, array in wanted.items()
            )
        different += not equal
    return {"layout": layout, "steps": steps, "hosts": HOSTS, "different": different}


def measured(name: str, **arguments: Any) -> dict[str, Any]:
    """Makes one measurement in a subprocess, and prints a line of JSON."""
    # Turns off some hundred lines of TensorFlow's warnings.
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "STARTED": str(time.time())}
    if arguments.pop("uncompiled", False):
        environment["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name, json.dumps(arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    found = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
    print(json.dumps({"name": name, **found}), flush=True)
    return found


def build(folder: Path, text: str, languages: int, pieces: int) -> Path:
    """Builds the cache of the text, and measures the stages."""
    import numpy as np

    from m4.data.corpus import CorpusSpec

    source, codes = corpora.text(text, languages)
    stages: list[tuple[str, float]] = []

    def report(stage: str, done: int, total: int) -> None:
        if not stages or stages[-1][0] != stage:
            stages.append((stage, time.perf_counter()))

    started = time.perf_counter()
    cache = CorpusSpec(source, codes, vocabulary_size=pieces).build(folder, progress=report)
    ended = time.perf_counter()
    times = [since for _, since in stages] + [ended]
    seconds = {name: end - since for (name, since), end in zip(stages, times[1:], strict=True)}
    ids = sum(len(np.load(path, mmap_mode="r")) for path in cache.folder.glob("*.tokens.*.npy"))
    line = {
        "languages": len(codes),
        "pairs": sum(cache.size(code, "train") for code in codes),
        "tokens": ids,
        "seconds": round(ended - started, 2),
        "stage_seconds": {name: round(value, 2) for name, value in seconds.items()},
        "tokens_per_second_of_tokenizing": round(ids / seconds["tokens"]),
    }
    print(json.dumps({"name": "build", **line}), flush=True)
    return cache.folder


def table(rows: list[tuple[str, dict[str, Any]]]) -> str:
    """Returns the results as a Markdown table."""
    columns = {
        "start, s": "seconds",
        "start, CPU-s": "cpu_seconds",
        "M tokens / CPU-s": "tokens_per_cpu_second",
        "filled": "filled",
        "pairs left out": "left_out",
        "RSS, MB": "peak_rss_mb",
        "of it not files": "rss_anon_mb",
    }
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, found in rows:
        cells = []
        for key in columns.values():
            value = found.get(key, "")
            if key == "tokens_per_cpu_second" and value:
                value = f"{value / 1e6:.2f}"
            elif key == "left_out" and value != "":
                value = f"{value} of {found['pairs']}"
            elif isinstance(value, float):
                value = f"{value:.3f}" if key == "filled" else f"{value:.1f}"
            cells.append(str(value))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Builds the caches in a temporary folder and measures."""
    arguments = parsed()
    if arguments.measure:
        name, values = arguments.measure
        function = {f.__name__: f for f in (start, feed, seqio, shares, resume)}[name]
        print(json.dumps(function(**json.loads(values))))
        return
    rows: list[Row] = []
    parts = arguments.parts
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder, news = Path(scratch) / "text", Path(scratch) / "news"
        folder = build(folder, arguments.folder, arguments.languages, arguments.pieces)
        from m4.data.cache.cache import Cache

        corpora.enlarge(Cache(folder), news, 0.1)
        common: dict[str, Any] = {"folder": str(folder)}
        if "start" in parts:
            rows += starts(folder, arguments)
        if "feed" in parts:
            rows += feeds(folder, "this text", arguments.seconds)
            rows += feeds(news, "news lengths", arguments.seconds)
        if arguments.gigabytes:
            large = Path(scratch) / "large"
            corpora.enlarge(Cache(folder), large, arguments.gigabytes)
            rows += feeds_of_large(large, 4 * arguments.seconds)
        if "seqio" in parts:
            found = measured("seqio", **common, rows=64, seconds=arguments.seqio_seconds)
            rows.append(("seqio's mixture, packed, 64 rows, this text", found))
        if "shares" in parts:
            measured("shares", **common)
        if "resume" in parts:
            steps = arguments.resume_steps
            measured("resume", **common, layout="packed", steps=steps)
    print(table(rows))


Row = tuple[str, dict[str, Any]]  # name and measurement


def parsed() -> argparse.Namespace:
    """Parses the command line, with `parts` as a list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="", help="TSV files (default: the embedded corpus)")
    parser.add_argument("--languages", type=int, default=100)
    parser.add_argument("--pieces", type=int, default=8000, help="pieces of the vocabulary")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure, or none")
    parser.add_argument("--gigabytes", type=float, default=0, help="size of a cache to feed from")
    parser.add_argument("--seconds", type=float, default=5, help="CPU seconds of each feed")
    parser.add_argument("--seqio_seconds", type=float, default=30, help="CPU seconds of seqio")
    parser.add_argument("--resume_steps", type=int, default=1000)
    parser.add_argument("--scratch", default=None, help="folder for the caches")
    parser.add_argument("--measure", nargs=2, help="threads of the child processes")
    arguments = parser.parse_args()
    arguments.parts = [] if arguments.parts == "none" else arguments.parts.split(",")
    if unknown := sorted(set(arguments.parts) - set(PARTS)):
        parser.error(f"--parts: no {', '.join(unknown)}; there are {', '.join(PARTS)}, or none")
    return arguments


def starts(folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """Measures the time until the first batch."""
    given: dict[str, Any] = {
        "folder": str(folder),
        "text": arguments.folder,
        "languages": arguments.languages,
        "pieces": arguments.pieces,
    }
    # Compiles and fills disk caches.
    measured("start", **given, directions=2, jobs=False)
    rows = []
    kinds = (20, False, False), (200, False, False), (200, False, True), (200, True, False)
    for directions, jobs, uncompiled in kinds:
        values = {"directions": directions, "jobs": jobs, "uncompiled": uncompiled}
        found = measured("start", **given, **values)
        name = f"start, {found['directions']} directions"
        name += ", as `m4 train` begins" * jobs + ", nothing compiled yet" * uncompiled
        rows.append((name, found))
    return rows


def feeds(folder: Path, what: str, seconds: float) -> list[Row]:
    """Measures consecutive batches in every layout."""
    rows = []
    kinds = ("packed", 16), ("packed", 64), ("packed", 512), ("single", 64)
    for layout, size in kinds:
        found = measured("feed", folder=str(folder), rows=size, layout=layout, seconds=seconds)
        rows.append((f"{layout}, {size} rows, {what}", found))
    return rows


def feeds_of_large(folder: Path, seconds: float) -> list[Row]:
    """Measures a cache that may exceed memory, from disk and once more."""
    rows = []
    for drop, how in ((True, "from the disk"), (False, "once more")):
        values = {"rows": 64, "layout": "packed", "seconds": seconds, "drop": drop}
        found = measured("feed", folder=str(folder), **values)
        rows.append((f"packed, 64 rows, {found['gigabytes']:.1f} GB, {how}", found))
    return rows


if __name__ == "__main__":
    main()
