"""How fast text becomes batches: `python benchmarks/data.py --folder FOLDER [--languages gl,mk]`.

FOLDER holds <lang>.{train,dev,test}.tsv. One JSON line a measurement: building the token cache and
opening it again; then, for each shape of a batch, making the stream, its batches in a row (mean and
the slowest: every --rows / 512th plans a group), seeking, share of places that hold a token, and
pairs that fitted nowhere. Clock seconds of one process.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from m4.data.cache import Cache, prepare
from m4.data.sources.tsv import Tsv
from m4.data.stream import Stream

SHAPES = ((16, 64), (16, 128), (64, 128), (512, 128))


def show(name: str, **values: Any) -> None:
    """One line of JSON."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"name": name, **rounded, "peak_rss_mb": memory}), flush=True)


def stream(cache: Cache, rows: int, length: int, steps: int) -> None:
    """Measures batches of rows x length / length."""
    started = time.perf_counter()
    made = Stream(cache, batch_rows=rows, source_length=length, target_length=length)
    opened = time.perf_counter() - started
    seconds, sources, targets = [], 0, 0
    for step in range(steps):
        started = time.perf_counter()
        batch = made.batch(step)
        seconds.append(time.perf_counter() - started)
        sources += int((batch["encoder_segment_ids"] > 0).sum())
        targets += int((batch["decoder_segment_ids"] > 0).sum())
    started = time.perf_counter()
    made.batch(10**9)
    places = steps * rows * length
    show(
        f"stream of {rows} x {length}",
        directions=len(made.directions),
        start_seconds=opened,
        batch_ms=1e3 * statistics.mean(seconds),
        slowest_batch_ms=1e3 * max(seconds),
        seek_ms=1e3 * (time.perf_counter() - started),
        tokens_per_second=round((sources + targets) / sum(seconds)),
        filled_sources=sources / places,
        filled_targets=targets / places,
        dropped=sum(made.dropped(step) for step in range(steps)),
        pairs=made.group_pairs * steps // made.group_steps,
    )


def main() -> None:
    """Builds a cache in a temporary folder and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--languages", default="", help="codes, as gl,mk; all by default")
    parser.add_argument("--rows", type=int, default=8192, help="rows to make of each shape")
    arguments = parser.parse_args()
    source = Tsv(arguments.folder, on_bad_line="skip")
    codes = arguments.languages.split(",") if arguments.languages else source.languages()
    with tempfile.TemporaryDirectory() as folder:
        stages: dict[str, float] = {}

        def report(stage: str, done: int, total: int) -> None:
            stages[stage] = time.perf_counter() - started

        for name in ("build", "open"):
            started = time.perf_counter()
            cache = prepare(
                Path(folder) / "cache",
                source,
                codes,
                source_length=64,
                target_length=64,
                report=report,
            )
            show(name, seconds=time.perf_counter() - started, done_at=dict(stages))
            stages.clear()
        for rows, length in SHAPES:
            stream(cache, rows, length, arguments.rows // rows)


if __name__ == "__main__":
    main()
