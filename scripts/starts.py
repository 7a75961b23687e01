"""Runs results/starts: five languages of 500 pairs, from scratch and from a model of 97 others.

    taskset -c 1 nice -n 5 python -m scripts.starts tatoeba runs/starts

A killed call goes on where it was: each command's folder says what is done. OUT/cost.jsonl has the
CPU seconds of each command.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from m4.config import load
from m4.storage.files import write_json

GIN = "gin_configs/tatoeba_102/dense.gin"
# Relatives among the others: many, two of the same script, one, none, none and a script of its own.
NEW = ("cat", "bel", "est", "eus", "kor")
PAIRS = 500  # of training, of each of them
OLD_TEST, OLD_DEV = 50, 20  # sentences of each of the others
STEPS, SEEDS = 2000, (0, 1, 2)
CONTINUED = {"TRAIN_STEPS": 300, "LEARNING_RATE": 2e-3}
REPLAY = {"replay_0": 0.0, "replay_30": 0.3}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tatoeba", type=Path, help="folder of scripts/tatoeba.py")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", help="names of systems (default: all)")
    asked = parser.parse_args()
    languages = load([GIN], []).macros()["LANGUAGES"]


if __name__ == "__main__":
    sys.exit(main())
