"""A handful of trials of each kind: CI's; `make chaos` runs hundreds (docs/robustness.md)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import trials
from tests.chaos.forks import Ended
from tests.chaos.world import World

ROOT = Path(__file__).parents[2]
NAMES = ("checkpoints/2/params/d/0", "checkpoints/4/params/d/1", "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.every_part
def test_nothing_is_lost_and_nothing_is_silently_wrong(tmp_path: Path) -> None:
    counts = "--kills=5 --damages=8 --disks=1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *counts.split(), f"--folder={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("how", trials.DAMAGES)
def test_every_damage_changes_the_file(how: str, tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * 100)
    path, before = tmp_path / NAMES[0], (tmp_path / NAMES[0]).read_bytes()
    detail = trials.DAMAGES[how](tmp_path, NAMES[0], random.Random(1))
    assert not path.exists() or path.read_bytes() != before
    if how == "flipped":
        changed = [a ^ b for a, b in zip(path.read_bytes(), before, strict=True) if a != b]
        assert [bits.bit_count() for bits in changed] == [1]
    if how == "swapped":  # with its like of another step
        assert detail == f"with {NAMES[1]}"
        assert (tmp_path / NAMES[1]).read_bytes() == before


@pytest.mark.parametrize(
    ("ended", "changed", "verdict"),
    [
        (Ended(0, "trained", "", 1.0), [], "survived"),
        (Ended(0, "trained", "", 1.0), ["checkpoints/6/params"], "silent"),
        (Ended(0, "", "checkpoints/4 is damaged", 1.0), ["checkpoints/6/note"], "named"),
        (Ended(2, "", "m4 train: checkpoints/4: damaged", 1.0), [], "named"),
        (Ended(2, "", "m4 train: it cannot be read", 1.0), [], "unnamed"),
        (Ended(1, "", "Traceback (most recent call last):\nValueError", 1.0), [], "traceback"),
        (Ended(-11, "", "", 1.0), [], "traceback"),
        (Ended(None, "", "", 1.0), [], "hang"),
        (Ended(0, "", "", 1.0, ("m4 worker",)), [], "lost"),
    ],
)
def test_ends_have_their_verdicts(
    ended: Ended, changed: list[str], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "changed", lambda *_: changed)
    world = World(Path("missing"), {})
    assert trials.judged(world, "train", ["checkpoints/4/params/d/1"], ended)[0] == verdict
