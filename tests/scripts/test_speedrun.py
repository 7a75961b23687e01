"""`scripts.results.speedrun`: losses in one unit, seconds over the reference's, and the page."""

from pathlib import Path

import numpy as np
import pytest

from m4.settings import InputError
from m4.storage.files import read_jsonl, write_json, write_jsonl
from scripts.results import kept, page, speedrun
from scripts.results.found import read
from tests.scripts.conftest import ASKED

EXPERIMENT = f"""{ASKED}baselines = ""
[runs]
[speedrun]
folder = "out"
loss = 2.0
reference = "../curve.jsonl"
date = "1 May"
about = "as it was"
pieces = 60
rules = ["One core."]
tried = "Short runs."
[[speedrun.record]]
name = "fast"
date = "2 May"
seeds = 2
about = "fewer pieces"
[[speedrun.pilot]]
name = "short"
about = "first try"
[[speedrun.pilot]]
name = "higher"
timed = "short"
about = "a higher rate"
[[speedrun.pilot]]
name = "missing"
about = "not begun"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes four short runs, and a reference with loss 2.0 halfway from 100 to 200 steps."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "experiment.toml").write_text(EXPERIMENT, encoding="utf-8")
    curve = [{"step": 100, "nll": [2.6, 2.4]}, {"step": 200, "nll": [1.6, 1.4]}]
    write_jsonl(tmp_path / "curve.jsonl", [{"run": "dense"}, *curve])
    # 10 * (5 + 1) + 2 * (29 + 1) pieces with their ends, twice as many as the reference has.
    sizes = {"gl": (10, 5.0), "es": (2, 29.0)}
    pairs = {pair: {"dev": {"pairs": count, "mean_pieces": {"first.target": mean}}}
             for pair, (count, mean) in sizes.items()}  # fmt: skip
    for run, nll in (("fast_0", 1.0), ("fast_1", 0.9), ("short", 1.2), ("higher", 1.1)):
        rows = [{"step": 40, "nll": 1.3}]
        if run == "fast_0":  # evaluated where the other seed is not
            rows.append({"step": 30, "dev/nll": 9.0})
        rows += [{"step": step, "dev/nll": nll + 40 / step - 1, "dev/nll/gl-en": 2.0,
                  "dev/nll/es-en": 1.0} for step in (20, 40)]  # fmt: skip
        write_jsonl(tmp_path / "out" / run / "metrics.jsonl", rows)
        write_json(tmp_path / "out" / run / "vocabulary" / "manifest.json",
                   {"language_pairs": pairs})  # fmt: skip
    write_json(tmp_path / "x" / "seconds.json", {"reference": 0.4, "fast": 0.4, "short": 0.5})
    assert speedrun.keep(tmp_path / "x", kept.asked(tmp_path / "x"), tmp_path) == [
        "4 runs; not trained: missing"
    ]
    return tmp_path / "x"


def test_a_loss_is_in_pieces_of_the_reference(folder: Path) -> None:
    first, second, *_ = read_jsonl(folder / "runs.jsonl")
    assert (first["nll"][1:], second["seed"]) == ([4.0, 2.0], 1)
    assert first["by_language"] == 3.0  # the mean of 2 and 1, times 2


def test_seconds_are_over_those_of_the_reference_to_the_same_loss(folder: Path) -> None:
    found = speedrun.read(folder, asked := kept.asked(folder))
    assert found is not None
    # The means over two seeds are 2.5 and 1.5 at 100 and 200 steps, 3.9 and 1.9 at 20 and 40.
    assert found.to(2.0) == pytest.approx((150, 60))
    assert found.to(2.0, "fast") == pytest.approx((39, 15.6))
    assert speedrun.here(found, asked) == (
        "Seconds to nll 2.00 over the reference's: fast 0.26 (2 seeds)."
    )
    with pytest.raises(InputError, match="fast does not come to"):
        found.to(1.2, "fast")


def test_the_page_has_rules_records_and_pilots(folder: Path) -> None:
    text = page.text(read(folder))
    assert "- One core." in text
    assert "| fast | 2 May | 39 | 0.400 | 0.26 | 2.000, 1.800 at 40 | 3.000, 3.000 | fewer" in text
    assert "| first try | 40 | 1.00 | 2.400 |  |" in text
    assert "| a higher rate | 40 | 1.00 | 2.200 | −0.200 |" in text  # timed as the first


def test_the_repository_s_table_agrees_with_its_files() -> None:
    """Computes the last record's ratio from the files themselves."""
    folder = kept.RESULTS / "speedrun"
    asked = kept.asked(folder)
    found, name = speedrun.read(folder, asked), asked.speedrun["record"][-1]["name"]
    assert found is not None
    rows, loss = found.of(name), asked.speedrun["loss"]
    assert len(rows) >= 2
    mean = np.mean([row["nll"] for row in rows], 0)
    # Falling curves, turned over because np.interp needs rising ones.
    steps = np.interp(-loss, -mean, rows[0]["steps"])
    reference = np.interp(-loss, -found.nll, found.steps)
    share = steps * found.seconds[name] / (reference * found.seconds["reference"])
    text = (folder / "README.md").read_text("utf-8")
    assert f"{name} {share:.2f} (2 seeds)" in text
    assert f"| {name} | 2026-11-26 | {steps:,.0f} |" in text
