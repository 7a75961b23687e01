"""Makes the runs of results/e2_depth to results/e7_gradients: one model each, one setting changed.

    taskset -c 1 nice -n 19 python -m scripts.ablations tatoeba runs/ablations --part=0/2

The first seed of every run comes first; translations come when all are trained. A killed call goes
on where it was. `--part=K/N` takes every N-th run; OUT/part<K>/cost.jsonl has the CPU seconds of
each command.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.results import kept
from scripts.starts import run_all

GIN = "gin_configs/tatoeba_102/moe_8.gin"
IMPORTS = "results/imports.gin"
FOLDERS = ("e4_gates", "e6_sampling", "e5_capacity", "e7_gradients", "e3_experts", "e2_depth")
LANGUAGES = (
    "rus", "spa", "por", "nld", "fin", "swe", "bul", "ina", "jbo", "cmn_Hant", "lit", "tgl",
    "ben", "tuk", "cat", "afr", "est", "kzj", "yue", "kha", "tha", "nno", "slk", "cym",
)  # fmt: skip  # every fourth of E1's
SETTINGS = (
    "WIDTH=64",
    "HEADS=2",
    "MLP_WIDTH=256",
    "VOCABULARY_SIZE=8000",
    "BATCH_SIZE=32",
    "TRAIN_STEPS=1000",
    "TEST_SENTENCES=100",
    f"LANGUAGES={[*LANGUAGES]}",
    "corpus.CorpusSpec.target_vocabulary_size=4000",
    "experiment.Experiment.baselines=None",
    "experiment.Training.dev_period=250",
    "experiment.Training.checkpoint_period=1000",
    "experiment.Training.tensorboard=False",
)


def main() -> int:
    """Trains and translates with each run that has not ended yet, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tatoeba", type=Path, help="folder that scripts/tatoeba.py wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every N-th run")
    parser.add_argument("--only", nargs="*", help="base_0, base_0:train, ... (default: all)")
    asked = parser.parse_args()
    out, (part, parts) = asked.out.resolve(), map(int, asked.part.split("/"))
    logs = out / f"part{part}"
    logs.mkdir(parents=True, exist_ok=True)
    names = {f"{name}_{seed}{job}" for name, seed, *_ in runs() for job in ("", ":train", ":eval")}
    if unknown := {*(asked.only or ())} - names:
        parser.error(f"--only: no {', '.join(sorted(unknown))}; a run is NAME_SEED, as base_0")
    mine = [run for at, run in enumerate(runs()) if at % parts == part]
    trained = (training(out, asked.tatoeba.resolve(), *run) for run in mine)
    translated = ((f"{name}_{seed}:eval", ["eval", str(out / f"{name}_{seed}")])
                  for name, seed, *_ in mine)  # fmt: skip
    return run_all(logs, itertools.chain(trained, translated), asked.only)


def runs() -> Iterator[tuple[str, int, str, list[str]]]:
    """Yields name, seed, gin file and settings of each run once, the first seeds first."""
    listed = [run for name in FOLDERS for run in kept.asked(kept.RESULTS / name).ablation["run"]]
    made = {run["name"]: (run.get("gin", GIN), run["settings"]) for run in listed}
    for seed in range(max(run["seeds"] for run in listed)):
        seeded = dict.fromkeys(run["name"] for run in listed if seed < run["seeds"])
        yield from ((name, seed, *made[name]) for name in seeded)


def timed(folder: Path) -> list[dict[str, Any]]:
    """Returns the runs of a folder of results/ as `scripts.seeds` names them, their first seed."""
    return [
        {
            "name": run["name"],
            "gin": [run.get("gin", GIN), IMPORTS],
            "bindings": [one.replace("=", " = ", 1) for one in (*SETTINGS, *run["settings"])],
            "seeds": [0],
        }
        for run in kept.asked(folder).ablation["run"]
    ]


def training(
    out: Path, tatoeba: Path, name: str, seed: int, gin: str, settings: list[str]
) -> tuple[str, list[str]]:
    """Returns name and arguments of the command that trains a run."""
    folders = [f"TEXT_DIR='{tatoeba}'", f"DATA_DIR='{out / 'data'}'"]
    every = [*folders, *SETTINGS, f"experiment.Training.seed={seed}", *settings]
    files = [f"--gin_file={gin}", f"--gin_file={IMPORTS}"]
    command = ["train", *files, f"--model_dir={out / f'{name}_{seed}'}"]
    return f"{name}_{seed}:train", [*command, *(f"--gin.{one}" for one in every)]


if __name__ == "__main__":
    sys.exit(main())
