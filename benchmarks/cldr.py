"""Measures making the embedded corpus: `python benchmarks/cldr.py --languages 24 --pairs 48000`.

It prints a JSON line per language, and one for all: accepted pairs (train, dev and test) per second
of CPU time on one core, with imports and loading of locales; wall time and peak resident memory.
"""

import argparse
import json
import resource
import time

STARTED = time.perf_counter(), time.process_time()

from m4.data.languages import LANGUAGES  # noqa: E402 (the clock starts before the imports)
from m4.data.sources import SPLITS  # noqa: E402
from m4.data.sources.cldr import Cldr  # noqa: E402


def report(name: str, pairs: int, started: tuple[float, float]) -> None:
    """Prints one line of JSON."""
    seconds = time.perf_counter() - started[0]
    cpu_seconds = time.process_time() - started[1]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {
        "languages": name,
        "pairs": pairs,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "pairs_per_cpu_second": round(pairs / cpu_seconds),
        "peak_rss_mb": round(memory),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    """Makes the corpus once, and measures it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--languages", default="24", help="number of languages, largest first, or codes: gl,fy,mk"
    )
    parser.add_argument("--pairs", type=int, default=48_000, help="total number of training pairs")
    arguments = parser.parse_args()
    if arguments.languages.isdigit():
        codes = list(LANGUAGES)[: int(arguments.languages)]
    else:
        codes = arguments.languages.split(",")
    corpus = Cldr(dict.fromkeys(codes, max(1, arguments.pairs // len(codes))))
    total = 0
    for code in codes:
        started = time.perf_counter(), time.process_time()
        pairs = sum(1 for split in SPLITS for _ in corpus.pairs(code, split))
        report(code, pairs, started)
        total += pairs
    report(f"{len(codes)} in all", total, STARTED)


if __name__ == "__main__":
    main()
