"""`m4 decode --audit` of a trained run: no token depends on its batch or on the devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from m4.eval.decoding.batch_invariance import Compared
from m4.jobs.decoding import audit as job
from tests.command_line import m4

# One length of sources, and so one program a number of rows.
SHORT = "--gin.experiment.Decoding.max_source_length=16"


def audit(run: Path, *arguments: str):
    return m4("decode", f"--model_dir={run}", "--audit", *arguments)


def test_no_token_changes_by_batch_order_or_mesh(trained: Path) -> None:
    said = audit(trained, "--sentences=3", SHORT)
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
    said = audit(trained, "--sentences=1", "--directions=en-gl")
    assert said.status == 1
    assert said.out.rstrip().endswith("2 of 63 tokens changed")


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ("--directions=en-xx", "no en-xx; there are en-es"),
        ("--sentences=0", "--sentences=0: must be 1 or more"),
        ("--input=a.txt", "--input: not with --audit"),
        ("--from=es", "--from: not with --audit"),
        ("--step=77", "no checkpoint of step 77"),
    ],
)
def test_a_mistake_is_one_line(trained: Path, arguments: str, mistake: str) -> None:
    assert mistake in audit(trained, *arguments.split()).mistake


def test_what_belongs_to_the_audit_is_refused_without_it(trained: Path) -> None:
    said = m4("decode", f"--model_dir={trained}", "--sentences=3")
    assert said.mistake == "m4 decode: --sentences: give --audit, too"
