"""`scripts/ablations.py`'s list of runs, and the pages of what they show."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4.config import load
from m4.storage.files import read_jsonl, write_json, write_jsonl
from scripts import ablations as made
from scripts.results import ablations, kept
from scripts.results.ablations import Run
from tests.scripts.conftest import ASKED


def run(name: str, *nll: list[float], **more: Any) -> Run:
    """Returns seeds with these losses of the languages, from many pairs to few."""
    given: dict[str, Any] = {
        "steps": np.array([500, 1000]), "curve": np.array([4.0, 3.0]), "routing": {}, "bleu": None,
        "seconds": None}  # fmt: skip
    return Run(name, name, more.pop("seeds", [*range(len(nll))]), np.array(nll), **(given | more))


def test_differences_are_between_paired_seeds_and_their_width_is_pooled() -> None:
    first = run("first", [3.0, 4.0], [3.2, 4.2])
    # Less the first of the same seed: a 0.1 and 0.3, about 0.2; b -0.1 and -0.5, about -0.3.
    a, b = run("a", [3.1, 4.1], [3.5, 4.5]), run("b", [2.9, 3.9], [2.7, 3.7])
    one = run("one", [3.2, 4.6], seeds=[1])  # 0.2 in its only seed, the second
    found = ablations.differences([first, a, b, one])
    assert [mean for mean, _ in found] == pytest.approx([0, 0.2, -0.3, 0.2])
    # Squares about the means: 2 * 0.1^2 + 2 * 0.2^2 = 0.1 over two degrees of freedom; Student's t
    # with two is 4.303.
    width = 4.303 * (0.1 / 2) ** 0.5
    assert [half for _, half in found][1:] == pytest.approx(
        [width / 2**0.5, width / 2**0.5, width], rel=1e-3
    )


EXPERIMENT = f"""{ASKED}baselines = ""
[runs]
[ablation]
folder = "out"
steps = 1000
routing = true
[[ablation.run]]
name = "first"
label = "as it was"
seeds = 2
settings = []
[[ablation.run]]
name = "other"
label = "changed"
seeds = 1
settings = ["LAYERS=4"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes results of runs that ended, except for the second seed of the first one."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "experiment.toml").write_text(EXPERIMENT, encoding="utf-8")
    for name, nll, steps in (("first_0", 3.4, 1000), ("first_1", 3.4, 500), ("other_0", 3.0, 1000)):
        rows: list[dict[str, float]] = []
        for step in range(500, steps + 1, 500):
            rows.append({"step": step, "nll": 3.0, "dead_experts": step / 4000})
            rows.append({"step": step, "dev/nll": 9.0, "dev/nll/gl-en": nll + 500 / step,
                         "dev/nll/es-en": nll + 500 / step + 1})  # fmt: skip
        write_jsonl(tmp_path / "out" / name / "metrics.jsonl", rows)
    write_json(tmp_path / "x" / "languages.json", {"gl": 60, "es": 900})
    return tmp_path / "x"


def test_what_ended_is_kept_and_what_did_not_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablations, "write_languages", lambda *_: None)  # there is no corpus
    monkeypatch.setattr(ablations, "sizes_of", lambda *_: {})
    (line,) = ablations.keep(folder, kept.asked(folder), folder.parent)
    assert line == "2 runs; not trained: first_1"
    first, other = read_jsonl(folder / "ablation.jsonl")
    # Means over the two languages: 3.4 + 500 / step + 0.5.
    assert first["nll"] == pytest.approx([4.9, 4.4])
    assert other["by_language"] == pytest.approx({"gl": 3.5, "es": 4.5})
    assert first["routing"] == {"dead_experts": 0.25}  # only step 1000 is in the second half
    (folder.parent / "out" / "other_0").rename(folder.parent / "elsewhere")
    ablations.keep(folder, kept.asked(folder), folder.parent)
    assert read_jsonl(folder / "ablation.jsonl") == [first, other]  # it stays
    read = ablations.read(folder, kept.asked(folder))
    assert read[1].nll == pytest.approx(np.array([[4.5, 3.5]]))  # es has more pairs


def test_every_run_of_the_results_is_a_config() -> None:
    for name in made.FOLDERS:
        for one in made.timed(kept.RESULTS / name):
            experiment = load(one["gin"], one["bindings"], model_dir="unused").experiment()
            assert (
                experiment.training.total_steps == kept.asked(kept.RESULTS / name).ablation["steps"]
            )
