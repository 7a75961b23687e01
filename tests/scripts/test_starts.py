"""The page of starts: gains over bilingual models, and what the old languages lose."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from m4.eval.scoring.delta import BILINGUAL, Delta
from scripts.results import kept, starts
from scripts.results.found import Compared

SEEDS = {"shared": ["shared_0"], "continued": ["more_0", "more_1"]}


def asked(folder: Path) -> kept.Asked:
    text = {field.name: "x" for field in dataclasses.fields(kept.Asked)}
    given = {"folder": folder, "runs": {}, "curves": {}}
    of = {"old": "start", "seeds": SEEDS, "cost": "cost.jsonl", "before": "Said before."}
    return kept.Asked(**{**text, **given, "starts": of})


def delta(run: str, baseline: str, language: str, value: float) -> Delta:
    """A difference whose replicates are its value less and plus 1."""
    return Delta(
        direction=f"{language}-en", language=language, name=language, side="xx->en", system=run,
        baseline=baseline, metric="bleu", train_pairs=500, sentences=100, baseline_score=10.0,
        system_score=10.0 + value, copy_score=0.0, delta=value, low=value - 1, high=value + 1,
        p_value=0.5, replicates=np.array([value - 1, value + 1]),
    )  # fmt: skip


@pytest.fixture
def compared() -> list[Compared]:
    gains = [delta("shared_0", BILINGUAL, "cat", 2.0), delta("shared_0", BILINGUAL, "kor", 0.0)]
    gains += [delta("more_0", BILINGUAL, "cat", 6.0), delta("more_0", BILINGUAL, "kor", 0.0)]
    gains += [delta("more_1", BILINGUAL, "cat", 4.0), delta("more_1", BILINGUAL, "kor", 2.0)]
    lost = [delta(run, "start", "rus", value) for run, value in (("more_0", -1), ("more_1", -3))]
    return [Compared(BILINGUAL, "bleu", gains, []), Compared("start", "bleu", lost, [])]


def test_rows_are_means_over_seeds_and_languages(tmp_path: Path, compared: list[Compared]) -> None:
    rows = {(row.start, row.about): row for row in starts.rows(asked(tmp_path), compared)}
    gain = rows["continued", "gain"]
    # (6 + 0 + 4 + 2) / 4; the seeds are (6 + 0) / 2 and (4 + 2) / 2.
    assert (gain.mean, gain.seeds, gain.languages) == (3.0, [3.0, 3.0], 2)
    assert 2 <= gain.low < gain.high <= 4  # of replicates 2 and 4
    assert rows["continued", "cat"].mean == 5.0
    assert rows["shared", "gain"].mean == 1.0
    lost = rows["continued", "forgotten"]
    assert (lost.mean, lost.seeds, lost.worst) == (-2.0, [-1.0, -3.0], "Russian −2.0")
    assert ("shared", "forgotten") not in rows
