"""Makes the runs of results/starts: five small languages, from scratch and from a model of others.

    taskset -c 1 nice -n 5 python -m scripts.starts tatoeba runs/starts

A killed call goes on where it was. OUT/cost.jsonl has the CPU seconds of each command.
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from m4.storage.files import read_json, read_jsonl

GIN = "gin_configs/tatoeba_102/dense.gin"
CONTINUED = "results/starts/continued.gin"
# Relatives among the others: many; two of its script; one; none; none, and a script of its own.
NEW = ("cat", "bel", "est", "eus", "kor")
PAIRS, OLD_TEST, OLD_DEV = 500, 50, 20  # training pairs of the new, sentences of the others
STEPS, SEEDS = 2000, (0, 1, 2)
SIZE = {"WIDTH": 64, "HEADS": 2, "MLP_WIDTH": 384}
GROWN = 17000  # pieces of the sources' vocabulary
# System -> its changes of CONTINUED. Slow: the layers learn at a tenth of the embeddings' rate.
_LONG = ("TRAIN_STEPS=1500", "experiment.Training.dev_period=150")
_SLOW = ("experiment.Training.parameter_rates={'encoder': 0.1, 'decoder': 0.1}",)
REPLAY = {
    "replay_0": ("KEEP_SHARE=0.0",),
    "replay_30": ("KEEP_SHARE=0.3",),
    "replay_90": ("KEEP_SHARE=0.9", *_LONG),
    "slow_30": ("KEEP_SHARE=0.3", *_SLOW),
}


def main() -> int:
    """Prepares the text, then runs each command that has not ended yet, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tatoeba", type=Path, help="folder that scripts/tatoeba.py wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", help="systems, or commands (start:train)")
    asked = parser.parse_args()
    out = asked.out.resolve()
    with open(GIN, encoding="utf-8") as file:
        listed = file.read().split("LANGUAGES = [")[1].split("]")[0]
    languages = listed.split("'")[1::2]
    if not (out / "text").is_dir():
        prepare(asked.tatoeba, out / "text", languages)
    return run_all(out, commands(out, languages), asked.only)


def run_all(
    out: Path, commands: Iterable[tuple[str, list[str]]], only: Sequence[str] | None
) -> int:
    """Runs each command that has not ended; returns the first status not 0.

    OUT/cost.jsonl gets the CPU seconds of each call. Those of a call that was killed together with
    this process are not known.
    """
    path = out / "cost.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    ended = {row["name"] for row in rows if not row.get("status")}
    for name, command in commands:
        if name in ended or (only and not {name, name.split(":")[0]} & {*only}):
            continue
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (out / f"{name.replace(':', '.').replace(' ', '_')}.log").open("a") as log:
            line = [sys.executable, "-m", "m4", *command]
            status = subprocess.run(line, stdout=log, stderr=log, check=False).returncode
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{name}: status {status}, {seconds:.0f} CPU s", flush=True)
        row = {"name": name, "cpu_seconds": round(seconds, 1), "status": status}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if status:
            return status
    return 0


def prepare(tatoeba: Path, text: Path, languages: list[str]) -> None:
    """Writes the text: the new languages cut to PAIRS, test and dev of the others cut."""
    text.mkdir(parents=True)
    for language in languages:
        new = language in NEW
        most = {"train": PAIRS if new else None, "dev": None if new else OLD_DEV,
                "test": None if new else OLD_TEST}  # fmt: skip
        for split, count in most.items():
            lines = (tatoeba / f"{language}.{split}.tsv").read_text("utf-8").splitlines(True)
            chosen = sorted(lines, key=lambda line: hashlib.sha256(line.encode()).digest())[:count]
            (text / f"{language}.{split}.tsv").write_text("".join(chosen), "utf-8")


def commands(out: Path, languages: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields name and arguments of each command, in order."""
    old = [language for language in languages if language not in NEW]

    def m4(command: str, system: str, chosen: Sequence[str], *more: str) -> tuple[str, list[str]]:
        return f"{system}:{command}", [
            *command.split(),
            f"--gin_file={GIN}",
            *more,
            f"--model_dir={out / system}",
            *(f"--gin.{name}={value}" for name, value in SIZE.items()),
            f"--gin.TEXT_DIR='{out / 'text'}'",
            f"--gin.DATA_DIR='{out / 'data'}'",
            f"--gin.BASELINES_DIR='{out / 'baselines'}'",
            f"--gin.LANGUAGES={list(chosen)}",
        ]

    steps = f"--gin.TRAIN_STEPS={STEPS}"
    grown = f"--gin.corpus.CorpusSpec.vocabulary_from='{out / 'start'}'"
    yield m4("train", "start", old, steps)
    yield m4("decode", "start", old, steps)
    yield m4("data prepare", "five", NEW, grown, f"--gin.VOCABULARY_SIZE={GROWN}")
    yield m4("baselines", "five", NEW, grown, f"--gin.VOCABULARY_SIZE={GROWN}")
    five = next(path.parent for path in (out / "data").glob("*/manifest.json")
                if {*read_json(path)["languages"]} == {*NEW})  # fmt: skip
    for seed in SEEDS:
        seeded = f"--gin.experiment.Training.seed={seed}"
        for system, changes in REPLAY.items():
            more = [
                f"--gin_file={CONTINUED}",
                f"--gin.START='{out / 'start'}@{STEPS}'",
                f"--gin.VOCABULARY='{five}'",
                f"--gin.OLD={old}",
                *(f"--gin.{change}" for change in changes),
                seeded,
            ]
            yield m4("train", f"{system}_{seed}", languages, *more)
            yield m4("decode", f"{system}_{seed}", languages, *more)
    for seed in SEEDS:
        seeded = f"--gin.experiment.Training.seed={seed}"
        yield m4("train", f"shared_{seed}", languages, steps, seeded)
        yield m4("decode", f"shared_{seed}", languages, steps, seeded)


if __name__ == "__main__":
    sys.exit(main())
