"""Makes the runs of results/zero_shot: a model of many pairs, and one of those of English alone.

    taskset -c 1 nice -n 19 python -m scripts.zero_shot tatoeba runs/zero_shot

The text is n-way: sentences that share an English sentence are translations of each other. No
sentence of a dev or test set, in whatever language, is in any training pair. A killed call goes on
where it was. OUT/cost.jsonl has the CPU seconds of each command.
"""

import argparse
import collections
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from m4.data.directions import pair_of
from m4.data.splits import HashSplit, normal, text_hash
from m4.storage.files import whole_folder
from scripts.starts import run_all

GIN = "gin_configs/tatoeba_102/dense.gin"
# In a ring: `any_to_any` is trained on pairs at odd distances too, on those at even ones no model.
RING = ("deu", "jpn", "fra", "heb", "spa", "rus", "nld", "tur", "ita", "epo", "por")
_DIRECT = (1, 3, 5)
STEPS = 4000
DEV = 60  # sentences of a pair at most
CHANGES = {
    "WIDTH": 64,
    "HEADS": 2,
    "MLP_WIDTH": 384,
    "VOCABULARY_SIZE": 8000,
    "MIXTURE_OR_TASK_NAME": "'direct'",
    "TRAIN_STEPS": STEPS,
    "TEST_SENTENCES": 150,
    "tsv.Tsv.files": "'{pair}.{split}.tsv'",
    "corpus.CorpusSpec.target_vocabulary_size": None,
    "experiment.Experiment.baselines": None,
    "experiment.Training.dev_period": 1000,
}
_ENGLISH = [pair_of(language) for language in RING]


def main() -> int:
    """Writes the text, then runs each command that has not ended yet, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tatoeba", type=Path, help="folder that scripts/tatoeba.py wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", help="names of systems (default: all)")
    asked = parser.parse_args()
    out = asked.out.resolve()
    if not (out / "text").is_dir():
        with whole_folder(out / "text") as unfinished:
            prepare(asked.tatoeba, unfinished)
    return run_all(out, commands(out), asked.only)


def pairs_at(distances: tuple[int, ...]) -> list[str]:
    """Returns the pairs of languages of the ring that are that far apart."""
    count = len(RING)
    return sorted(pair_of(f"{RING[at]}-{RING[(at + far) % count]}")
                  for far in distances for at in range(count))  # fmt: skip


def prepare(tatoeba: Path, text: Path) -> None:
    """Writes <pair>.<split>.tsv of all pairs.

    English sentences with translations in two languages of the ring are test sentences, one in
    three, or dev sentences, one in 20. All others are trained on, but for pairs with a side that is
    in a dev or test set. In these an English sentence has one translation in a language.
    """
    known: dict[str, dict[str, list[str]]] = collections.defaultdict(dict)
    for language in RING:
        for split in ("train", "dev", "test"):
            for line in (tatoeba / f"{language}.{split}.tsv").read_text("utf-8").splitlines():
                english, translation = line.split("\t")
                known[english].setdefault(language, []).append(translation)
    split_of = HashSplit("zero_shot", dev_every=20, test_every=3)
    parts: dict[str, dict[str, dict[str, list[str]]]] = {"train": {}, "dev": {}, "test": {}}
    for english in sorted(known, key=text_hash):
        split = split_of(english) if len(known[english]) > 1 else "train"
        rows = {code: sorted(found, key=text_hash) for code, found in known[english].items()}
        if split != "train":
            rows = {code: found[:1] for code, found in rows.items()}
        parts[split][english] = {"en": [english], **rows}
    held: dict[str, set[str]] = collections.defaultdict(set)
    for split in ("dev", "test"):
        for rows in parts[split].values():
            for code, found in rows.items():
                held[code].update(map(normal, found))
    for pair in (*_ENGLISH, *map(pair_of, map("-".join, combinations(RING, 2)))):
        first, second = pair.split("-")
        for split, of_english in parts.items():
            lines = [f"{a}\t{b}\n" for rows in of_english.values()
                     for a in rows.get(first, ()) for b in rows.get(second, ())
                     if split != "train" or not
                     (normal(a) in held[first] or normal(b) in held[second])]  # fmt: skip
            chosen = list(dict.fromkeys(lines))[: DEV if split == "dev" else None]
            (text / f"{pair}.{split}.tsv").write_text("".join(chosen), encoding="utf-8")


def commands(out: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields name and arguments of each command, in order."""
    direct = pairs_at(_DIRECT)
    for system, more in {"any_to_any": direct, "centric": [], "any_to_any_1": direct}.items():
        changes = {**CHANGES, "TEXT_DIR": f"'{out / 'text'}'", "DATA_DIR": f"'{out / 'data'}'",
                   "LANGUAGES": [*_ENGLISH, *more],
                   "experiment.Training.seed": int(system == "any_to_any_1")}  # fmt: skip
        if system == "centric":  # the same vocabulary
            changes["corpus.CorpusSpec.vocabulary_from"] = f"'{out / 'any_to_any'}'"
        settings = [f"--gin.{name}={value}" for name, value in changes.items()]
        run = [f"--gin_file={GIN}", f"--model_dir={out / system}", *settings]
        yield f"{system}:train", ["train", *run]
        yield f"{system}:eval", ["eval", str(out / system)]
        yield f"{system}:zero_shot", ["eval", str(out / system), "--zero_shot"]


if __name__ == "__main__":
    sys.exit(main())
