"""Compares preparation by processes and on Beam's direct runner: `python benchmarks/beam.py`.

The text of --pairs made-up pairs, in files of 250,000, becomes a corpus twice, each time in a
separate process: with --workers processes of m4, and with as many workers of Beam. Each run prints
a JSON line with CPU seconds of all processes, pairs per CPU second, the largest resident memory of
a process, the largest disk use of text, corpus and shards, and a hash of the corpus, which is then
removed. The last line tells whether the corpora are equal, and the ratio of CPU seconds. A runner
whose line is in --folder is not measured again. Run `make beam` first. The full size takes hours
on two cores:

  python benchmarks/beam.py --pairs=50000000 --workers=4 --folder=FOLDER
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from m4.data.beam import Engine
from m4.data.corpus import CorpusSpec
from m4.data.sources.tsv import Tsv

LANGUAGES = ("gl", "fy", "de", "es")
FILE_PAIRS, WORDS, BLOCK = 250_000, 50_000, 50_000
RUNNERS = ("local", "direct")


class Sentences:
    """Source of random pairs of sentences of 4 to 30 words out of 50,000, by Zipf's law."""

    def __init__(self, language: str) -> None:
        self._rng = np.random.default_rng([*language.encode()])
        shares = 1 / (10 + np.arange(WORDS))
        self._drawn = np.repeat(
            np.arange(WORDS), np.ceil(shares * (1 << 20) / shares.sum()).astype(int)
        )
        # For each side: its words inside a sentence, and its words at the end of one.
        self._table = np.array(
            [
                f"{f'{number:x}{side}'[::-1]}{end}"
                for side, last in (("a", "\t"), (language, "\n"))
                for end in (" ", last)
                for number in range(WORDS)
            ],
            object,
        )
        self._seen: list[str] = []

    def lines(self, pairs: int, again: float = 0.02) -> list[str]:
        """Returns pairs as lines; a share `again` of them repeats one of the first pairs."""
        lengths = self._rng.integers(4, 31, 2 * pairs)
        ends = np.cumsum(lengths)
        index = self._drawn[self._rng.integers(0, len(self._drawn), ends[-1])]
        index[ends - 1] += WORDS
        index += np.repeat(np.tile([0, 2 * WORDS], pairs), lengths)
        lines = "".join(self._table[index].tolist()).splitlines(keepends=True)
        self._seen = self._seen or lines[:10_000]
        for row in np.flatnonzero(self._rng.random(pairs) < again).tolist():
            lines[row] = self._seen[self._rng.integers(len(self._seen))]
        return lines


def write_text(folder: Path, pairs: int) -> None:
    """Writes training files, in which about one pair in 50 is a repetition, and small test sets."""
    folder.mkdir(parents=True)
    of_language = pairs // len(LANGUAGES)
    for language in LANGUAGES:
        sentences = Sentences(language)
        for part, start in enumerate(range(0, of_language, FILE_PAIRS)):
            stop = min(start + FILE_PAIRS, of_language)
            with (folder / f"{part:04}.{language}.train.tsv").open("w") as file:
                for block in range(start, stop, BLOCK):
                    file.writelines(sentences.lines(min(BLOCK, stop - block)))
        for split in ("dev", "test"):
            text = "".join(sentences.lines(200, 0))
            (folder / f"0.{language}.{split}.tsv").write_text(text)


def prepare(folder: Path, runner: str, workers: int) -> None:
    """Makes a corpus and prints its cost, including that of child processes."""
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
    cpu, command = (sum(one.ru_utime + one.ru_stime for one in of) for of in (usage, usage[:1]))
    print(
        json.dumps(
            {
                "runner": runner,
                "workers": workers,
                "pairs": read,
                "seconds": round(time.perf_counter() - started, 1),
                "cpu_seconds": round(cpu, 1),
                "command_cpu_seconds": round(command, 1),
                "pairs_a_cpu_second": round(read / cpu),
                "command_peak_rss_mb": usage[0].ru_maxrss // 1024,
                "worker_peak_rss_mb": usage[1].ru_maxrss // 1024,
            }
        )
    )


def measured(folder: Path, runner: str, workers: int) -> dict[str, Any]:
    """Returns the output of `prepare` in a separate process, and a hash of its corpus."""
    given = [f"--folder={folder}", f"--runner={runner}", f"--workers={workers}"]
    most = 0
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen([sys.executable, __file__, *given], stdout=said)
        while running.poll() is None:
            most = max(most, size(folder))
            time.sleep(2)
        if running.returncode:
            sys.exit(running.returncode)
        said.seek(0)
        found = json.loads(said.read())
    files = sorted(path for path in (folder / runner).rglob("*") if path.is_file())
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(folder / runner)} {content}\n".encode())
    shutil.rmtree(folder / runner)
    shutil.rmtree(folder / "work", ignore_errors=True)
    return {**found, "most_disk_gb": round(most / 1e9, 2), "corpus": whole.hexdigest()}


def size(folder: Path) -> int:
    """Returns the bytes of a folder's files, some of which may disappear meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runner", help="measure only this runner, in this process")
    arguments = parser.parse_args()
    if arguments.runner:
        prepare(arguments.folder, arguments.runner, arguments.workers)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = arguments.folder or Path(folder)
        if not (place / "text").is_dir():
            write_text(place / "new", arguments.pairs)
            (place / "new").rename(place / "text")
        found = []
        for runner in RUNNERS:
            path = place / f"{runner}.json"
            if not path.is_file():
                path.write_text(json.dumps(measured(place, runner, arguments.workers)))
            print(path.read_text(), flush=True)
            found.append(json.loads(path.read_text()))
        local, direct = found
        overhead = direct["cpu_seconds"] / local["cpu_seconds"]
        same = local["corpus"] == direct["corpus"]
        print(json.dumps({"equal": same, "overhead": round(overhead, 2)}))


if __name__ == "__main__":
    main()
