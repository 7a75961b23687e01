"""`m4 decode --batch_invariance`: no token of a trained run depends on its batch or devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from m4.eval.decoding.batch_invariance import Compared
from m4.jobs.decoding import batch_invariance as job
from tests.command_line import m4

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
    def changed(model: object, vocabulary: object, sources: object, *more: object):
        found = Compared(sentences=1, tokens=9)
        found.changed["1 device, 8 rows"] = 2
        return {"en-gl": found}

    monkeypatch.setattr(job.batch_invariance, "changed_tokens", changed)
    said = check(trained, "--sentences=1", "--directions=en-gl")
    assert said.status == 1
    assert said.out.rstrip().endswith("2 of 63 tokens changed")


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ("--directions=en-xx", "no en-xx; there are en-es"),
        ("--sentences=0", "--sentences=0: must be 1 or more"),
        ("--input=a.txt", "--input: not with --batch_invariance"),
        ("--from=es", "--from: not with --batch_invariance"),
        ("--step=77", "no checkpoint of step 77"),
    ],
)
def test_a_mistake_is_one_line(trained: Path, arguments: str, mistake: str) -> None:
    assert mistake in check(trained, *arguments.split()).mistake


def test_what_belongs_to_the_check_is_refused_without_it(trained: Path) -> None:
    said = m4("decode", f"--model_dir={trained}", "--sentences=3")
    assert said.mistake == "m4 decode: --sentences: give --batch_invariance, too"
