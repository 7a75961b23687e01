"""How fast the embedded corpus is made: `python benchmarks/cldr.py --languages 24 --pairs 48000`.

One JSON line a language, then one for all: accepted pairs a second (train, dev and test; loading
of the locales and imports included in the last line), peak resident memory. One core.
"""

import argparse
import json
import resource
import time

STARTED = time.perf_counter()

from m4.data.languages import LANGUAGES  # noqa: E402 (the clock starts before the imports)
from m4.data.sources import SPLITS  # noqa: E402
from m4.data.sources.cldr import Cldr  # noqa: E402


def report(name: str, pairs: int, seconds: float) -> None:
    """One line of JSON."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {
        "languages": name,
        "pairs": pairs,
        "seconds": round(seconds, 3),
        "pairs_per_second": round(pairs / seconds),
        "peak_rss_mb": round(memory),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    """Makes the corpus once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--languages", default="24", help="how many, in order of size, or codes: gl,fy,mk"
    )
    parser.add_argument("--pairs", type=int, default=48_000, help="training pairs in all")
    arguments = parser.parse_args()
    if arguments.languages.isdigit():
        codes = list(LANGUAGES)[: int(arguments.languages)]
    else:
        codes = arguments.languages.split(",")
    corpus = Cldr(dict.fromkeys(codes, max(1, arguments.pairs // len(codes))))
    total = 0
    for code in codes:
        start = time.perf_counter()
        pairs = sum(1 for split in SPLITS for _ in corpus.pairs(code, split))
        report(code, pairs, time.perf_counter() - start)
        total += pairs
    report(f"{len(codes)} in all", total, time.perf_counter() - STARTED)


if __name__ == "__main__":
    main()
