"""`m4 decode --batch_invariance`: no token of a trained run depends on its batch or devices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from m4.jobs.decoding import batch_invariance as job
from tests.command_line import m4
from tests.eval.small_model import MOE, SETTINGS, Words, sentences, tiny

# One length of sources, and so one program a number of rows.
SHORT = "--gin.experiment.Decoding.max_source_length=16"


def check(run: Path, *arguments: str):
    return m4("decode", f"--model_dir={run}", "--batch_invariance", *arguments)


def test_no_token_changes_by_batch_order_or_mesh(trained: Path) -> None:
    said = check(trained, "--sentences=3", SHORT)
    assert said.status == 0, said.err
    assert "0 of " in said.out
    assert said.out.rstrip().endswith("tokens changed")
    for direction in ("en-es", "en-gl", "en-pt", "es-en", "gl-en", "pt-en"):
        assert direction in said.out


def test_a_changed_token_is_exit_status_1(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(model: Any, params: Any, pieces: Any, texts: Any, settings: Any, *more: Any):
        return [[7, 8, 8, 1] if settings.batch_rows == 8 else [7, 9, 1] for _ in texts]

    monkeypatch.setattr(job, "translated", found)
    said = check(trained, "--sentences=1", "--directions=en-gl")
    assert said.status == 1
    # Of 7 9 1 -> 7 8 8 1 two tokens are others and one is new, on one device and over the mesh.
    assert said.out.rstrip().endswith("6 of 21 tokens changed")


@pytest.mark.parametrize("dropping", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_model_that_drops_tokens_depends_on_its_batch(dropping: bool) -> None:
    """The planted fault: experts with too few slots for the tokens of a batch of beams."""
    model, params = tiny(moe=partial(MOE, decode_capacity_factor=0.5) if dropping else MOE)
    texts = sentences(11, seed=1)
    one, *others = (
        job.translated(model, params, Words(), texts, replace(SETTINGS, batch_rows=rows), None, mix)
        for rows, mix in ((1, False), (8, False), (8, True))
    )
    differ = [sum(map(job.changed, one, each)) for each in others]
    assert (max(differ) > 0) == dropping


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ("--directions=en-xx", "no en-xx; there are en-es"),
        ("--input=a.txt", "--input: not with --batch_invariance"),
        ("--from=es", "--from: not with --batch_invariance"),
    ],
)
def test_a_mistake_is_one_line(trained: Path, arguments: str, mistake: str) -> None:
    assert mistake in check(trained, *arguments.split()).mistake


def test_what_belongs_to_the_check_is_refused_without_it(trained: Path) -> None:
    said = m4("decode", f"--model_dir={trained}", "--sentences=3")
    assert said.mistake == "m4 decode: --sentences: give --batch_invariance, too"
