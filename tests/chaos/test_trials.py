"""The trials themselves: what they do to files, and that they see what is wrong."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.chaos import phases
from tests.chaos.forks import Ended
from tests.chaos.phases import Event, Span
from tests.chaos.table import not_held, table
from tests.chaos.trial import VERDICTS, Trial
from tests.chaos.trials import damage
from tests.chaos.world import World

ROOT = Path(__file__).parents[2]
NAMES = ("checkpoints/2/params/d/0", "checkpoints/4/params/d/1", "metrics.jsonl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * 100)
    return tmp_path


@pytest.mark.parametrize("how", damage.DAMAGES)
def test_every_damage_changes_the_file(how: str, folder: Path) -> None:
    path, before = folder / NAMES[0], (folder / NAMES[0]).read_bytes()
    detail = damage.DAMAGES[how](folder, NAMES[0], random.Random(1))
    assert not path.exists() or path.read_bytes() != before
    if how == "flipped":
        changed = [a ^ b for a, b in zip(path.read_bytes(), before, strict=True) if a != b]
        assert [bits.bit_count() for bits in changed] == [1]
    if how == "swapped":  # with its like of another step
        assert detail == f"with {NAMES[1]}"
        assert (folder / NAMES[1]).read_bytes() == before


def test_hooks_are_on_functions_that_exist() -> None:
    for names in phases.FUNCTIONS.values():
        for name in names:
            module, _, attribute = name.partition(":")
            text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            last = attribute.split(".")[-1]
            assert re.search(rf"\bdef {last}\(|^from .* import .*\b{last}\b", text, re.MULTILINE), (
                name
            )


def test_a_step_lasts_until_the_next_event_and_a_phase_until_its_end() -> None:
    events = [
        Event(0.0, "step", True),
        Event(1.0, "compile", True),
        Event(5.0, "compile", False),
        Event(6.0, "step", True),
        Event(6.5, "save", True),
    ]
    assert phases.spans(events) == [
        Span("step", 0, 1.0),
        Span("compile", 0, 4.0),
        Span("step", 1, 0.5),
        Span("save", 0, 0.4),  # the least that counts: it continues after its call
    ]


def verdict_of(monkeypatch: pytest.MonkeyPatch, ended: Ended, *changed: str) -> str:
    monkeypatch.setattr(damage, "changed", lambda *_: list(changed))
    world = World(Path("missing"), {})
    return damage.judged(world, "train", ["checkpoints/4/params/d/1"], ended)[0]


def test_another_result_without_a_word_is_silently_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    well, wrong = Ended(0, "trained", "", 1.0), "checkpoints/6/params/embedding"
    assert verdict_of(monkeypatch, well) == "survived"
    assert verdict_of(monkeypatch, well, wrong) == "silent"
    said = Ended(0, "", "checkpoints/4 is damaged, moved aside", 1.0)
    assert verdict_of(monkeypatch, said, wrong) == "named"


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [
        (Ended(2, "", "m4 train: checkpoints/4: damaged", 1.0), "named"),
        (Ended(2, "", "m4 train: it cannot be read", 1.0), "unnamed"),
        (Ended(1, "", "Traceback (most recent call last):\nValueError", 1.0), "traceback"),
        (Ended(-11, "", "", 1.0), "traceback"),
        (Ended(None, "", "", 1.0), "hang"),
        (Ended(0, "", "", 1.0, ("m4 worker",)), "lost"),
    ],
)
def test_ends_have_their_verdicts(
    ended: Ended, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict_of(monkeypatch, ended) == verdict


def test_the_table_counts_and_shows_the_worst_first() -> None:
    trials = [Trial("kill -9", "step", "", verdict, "") for verdict in ("survived", *VERDICTS)]
    assert [trial.verdict for trial in not_held(trials)] == [
        "silent", "lost", "hang", "traceback", "unnamed",
    ]  # fmt: skip
    last = table(trials).splitlines()[-1]
    assert last == "| all | 8 | 2 | 1 | 1 | 1 | 1 | 1 | 1 |"
