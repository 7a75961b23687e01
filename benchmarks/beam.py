"""Preparation by processes and on Beam's direct runner: `python benchmarks/beam.py`.

Text of --pairs made-up pairs, in files of 250,000, becomes a corpus: once by --workers processes,
once by as many workers of Beam, each in a separate process. One JSON line each: CPU seconds of all
processes, pairs a CPU second, and the largest resident memory of any process; and one for both:
whether the corpora are equal, and the CPU seconds on Beam in those of the local runner. `make beam`
first. The full size, which takes hours on two cores:

  python benchmarks/beam.py --pairs=50000000 --workers=4 --folder=FOLDER
"""

import argparse
import filecmp
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from m4.data.beam import Engine
from m4.data.corpus import CorpusSpec
from m4.data.sources.tsv import Tsv

LANGUAGES = ("gl", "fy", "de", "es")
FILE_PAIRS = 250_000


def sentences(rng: random.Random, ending: str) -> Iterator[str]:
    """Yields sentences of 4 to 30 words out of 50,000, frequent ones more often (Zipf)."""
    words = [f"{number:x}{ending}"[::-1] for number in range(50_000)]
    weights = [1 / (10 + number) for number in range(len(words))]
    while True:
        drawn = rng.choices(words, weights, k=20_000)
        while len(drawn) > 30:
            length = rng.randint(4, 30)
            yield " ".join(drawn[:length])
            del drawn[:length]


def write_text(folder: Path, pairs: int) -> None:
    """Writes training files, of whose pairs one in 50 is there before, and small test sets."""
    folder.mkdir(parents=True)
    of_language = pairs // len(LANGUAGES)
    for language in LANGUAGES:
        rng = random.Random(language)
        first, second = sentences(rng, "a"), sentences(rng, language)
        seen: list[str] = []
        for part, start in enumerate(range(0, of_language, FILE_PAIRS)):
            with (folder / f"{part:04}.{language}.train.tsv").open("w") as file:
                for _ in range(min(FILE_PAIRS, of_language - start)):
                    line = f"{next(first)}\t{next(second)}\n"
                    if seen and rng.random() < 0.02:
                        line = rng.choice(seen)
                    elif len(seen) < 10_000:
                        seen.append(line)
                    file.write(line)
        for split in ("dev", "test"):
            text = "".join(f"{next(first)}\t{next(second)}\n" for _ in range(200))
            (folder / f"0.{language}.{split}.tsv").write_text(text)


def prepare(folder: Path, runner: str, workers: int) -> None:
    """Makes a corpus and prints what it took, with all processes that this one started."""
    engine = None
    if runner != "local":
        engine = Engine(runner, [], workers)
        engine.open(str(folder / "work"))
    source = Tsv(folder / "text", files="*.{lang}.{split}.tsv")
    spec = CorpusSpec(source, workers=workers, vocabulary_size=8000, vocabulary_sentences=50_000)
    started = time.perf_counter()
    cache = spec.build(folder / runner, engine=engine)
    usage = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    read = cache.ledger().total("train").read
    cpu = sum(one.ru_utime + one.ru_stime for one in usage)
    print(
        json.dumps(
            {
                "runner": runner,
                "workers": workers,
                "pairs": read,
                "seconds": round(time.perf_counter() - started, 1),
                "cpu_seconds": round(cpu, 1),
                "pairs_a_cpu_second": round(read / cpu),
                "command_peak_rss_mb": usage[0].ru_maxrss // 1024,
                "worker_peak_rss_mb": usage[1].ru_maxrss // 1024,
                "corpus": str(cache.folder),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runner", help="measure this one alone, in this process")
    arguments = parser.parse_args()
    if arguments.runner:
        prepare(arguments.folder, arguments.runner, arguments.workers)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = arguments.folder or Path(folder)
        if not (place / "text").is_dir():
            write_text(place / "text", arguments.pairs)
        found = []
        for runner in ("local", "direct"):
            given = [f"--folder={place}", f"--runner={runner}", f"--workers={arguments.workers}"]
            command = [sys.executable, __file__, *given]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(said, end="", flush=True)
            found.append(json.loads(said))
        corpora = [Path(one["corpus"]) for one in found]
        one, two = (
            sorted(path.relative_to(c).as_posix() for path in c.rglob("*") if path.is_file())
            for c in corpora
        )
        compared = filecmp.cmpfiles(corpora[0], corpora[1], one, shallow=False)
        same = one == two and not any(compared[1:])
        overhead = found[1]["cpu_seconds"] / found[0]["cpu_seconds"]
        print(json.dumps({"equal": same, "overhead": round(overhead, 2)}))


if __name__ == "__main__":
    main()
