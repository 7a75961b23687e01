"""`scripts.results.curves`: what a loss costs, and leads at equal steps, on made-up curves."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from m4.storage.files import read_json, read_jsonl, write_json, write_jsonl
from scripts.results import curves, kept, summary
from scripts.results.__main__ import main
from tests.scripts.conftest import ASKED

CURVES = f"""{ASKED}baselines = "none"
[runs]
[curves]
folder = "rows"
losses = [2.5, 2.2]
step = 200
"""
# Two seeds; the mean over them is what costs are taken from.
ROWS = {
    # dense 64: means 3.0, 2.6, 2.2; nll 2.5 is a quarter of the way from 2.6 to 2.2: step 225.
    "dense": (64, 0, 1, 10.0, [(100, [3.1, 2.9]), (200, [2.7, 2.5]), (300, [2.2, 2.2])]),
    # 8 experts: means 3.0, 2.4; nll 2.5 is 5/6 of the way: step 183.3.
    "experts": (64, 8, 2, 12.0, [(100, [3.1, 2.9]), (200, [2.5, 2.3])]),
    # dense 32: half the FLOPs, means 3.2, 2.4: step 187.5.
    "small": (32, 0, 1, 5.0, [(100, [3.2, 3.2]), (200, [2.4, 2.4])]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes results with the curves of ROWS; directions spread around their seed's mean."""
    place = tmp_path / "results" / "made"
    place.mkdir(parents=True)
    (place / "experiment.toml").write_text(CURVES, encoding="utf-8")
    for run, (width, experts, every, flops, rows) in ROWS.items():
        head = {"run": run, "width": width, "experts": experts, "every": every, "flops": flops}
        head |= {"parameters": 1000, "seeds": [0, 1], "directions": ["a-en", "b-en", "c-en"]}
        # Directions of experts do not lead alike, those of seeds do not differ alike.
        spread = np.array([-0.1, 0.0, 0.1]) * bool(experts)
        made = [{"step": step, "nll": nll, "tokens": 50,
                 "by_direction": [(each + spread + luck * np.array([0.05, 0.0, -0.05])).tolist()
                                  for luck, each in enumerate(nll)]}
                for step, nll in rows]  # fmt: skip
        write_jsonl(place / "curves" / f"{run}.jsonl", [head, *made])
    return place


def test_a_crossing_lies_on_the_line_between_two_evaluations() -> None:
    # From 3.0 at 100 to 2.0 at 200: 2.25 is three quarters of the way.
    assert curves.steps_to([100, 200, 300], [3.0, 2.0, 2.5], 2.25) == 175.0
    assert curves.steps_to([100, 200], [3.0, 2.0], 2.0) == 200.0  # at the evaluation itself
    assert curves.steps_to([100, 200], [3.0, 2.0], 1.9) is None
    assert curves.steps_to([100, 200], [3.0, 2.0], 3.1) is None  # already below at the first


def test_costs_are_of_the_best_width(folder: Path) -> None:
    found = curves.read(folder)
    steps, flops = (curves.best(found, 2.5, cost) for cost in ("steps", "FLOPs"))
    assert [(name, one.run) for name, one in steps.items()] == [
        ("dense", "small"), ("8 experts", "experts")]  # fmt: skip
    assert steps["8 experts"].cost == pytest.approx(100 + 100 * 5 / 6)
    assert steps["8 experts"].cheaper == pytest.approx(187.5 / (100 + 100 * 5 / 6))
    # 187.5 steps of 5 against 183.3 of 12.
    assert flops["8 experts"].cheaper == pytest.approx(187.5 * 5 / (12 * (100 + 100 * 5 / 6)))
    assert not curves.best(found, 2.5, "core-hours")
    # Dense alone comes to 2.2, of which only width 64: at its last step.
    assert curves.best(found, 2.2, "steps") == {"dense": curves.Best("dense", 300.0, 1.0)}


def test_hours_are_steps_times_their_seconds(folder: Path) -> None:
    write_json(folder / "seconds.json", {"dense": 36.0, "small": 18.0, "experts": 72.0})
    hours = curves.best(curves.read(folder), 2.5, "core-hours")
    # 187.5 steps of 18 s; dense of width 64 would take 225 of 36 s.
    assert hours["dense"].run == "small"
    assert hours["dense"].cost == pytest.approx(187.5 * 18 / 3600)
    assert hours["8 experts"].cost == pytest.approx((100 + 100 * 5 / 6) * 72 / 3600)


def test_leads_are_paired_by_direction_and_seed(folder: Path) -> None:
    found = {curve.run: curve for curve in curves.read(folder)}
    # 2.5 - 2.7 and 2.3 - 2.5; over directions -0.3, -0.2, -0.1: deviation 0.1, error 0.1 / sqrt(3).
    leads = curves.differences(found["experts"], found["dense"], 200)
    assert len(leads) == 2
    for mean, error in leads.values():
        assert mean == pytest.approx(-0.2)
        assert error == pytest.approx(0.1 / np.sqrt(3))
    # Four pairs of the same lead: no noise of seeds. Two are too few.
    wider = [dataclasses.replace(found[name], width=65) for name in ("dense", "experts")]
    (kind,) = curves.by_kind([*found.values(), *wider], 200).items()
    same = (4, pytest.approx(-0.2), pytest.approx(0, abs=1e-9))
    assert kind == ("8 experts, every other layer", same)
    assert curves.by_kind([*found.values()], 200) == {}


def test_a_seed_is_compared_with_the_same_one(folder: Path) -> None:
    path = folder / "curves" / "experts.jsonl"
    head, first, last = read_jsonl(path)
    for row in (first, last):
        row |= {name: row[name][1:] for name in ("nll", "by_direction")}
    write_jsonl(path, [head | {"seeds": [1]}, first, last])
    found = {curve.run: curve for curve in curves.read(folder)}
    alone = curves.differences(found["experts"], found["dense"], 200)
    assert alone == {1: (pytest.approx(-0.2), pytest.approx(0.1 / np.sqrt(3)))}
    text = "\n".join(curves.sections([*found.values()], {"losses": [2.5], "step": 200}))
    assert "| experts |  | −0.200 ± 0.113, −3.5 |" in text  # 1.96 times the error


def test_runs_of_a_config_are_its_seeds(folder: Path) -> None:
    text = CURVES.replace('folder = "rows"', 'seeds = {a = ["a_0", "a_1"]}')
    (folder / "experiment.toml").write_text(text, encoding="utf-8")
    for run, nll, last in (("a_0", 3.0, 300), ("a_1", 2.8, 200)):
        speed = {"step_seconds": 0.5, "tokens_per_second": 100}
        rows = [{"step": step, "dev/nll": nll, "dev/nll/a-en": nll, **speed}
                for step in range(100, last + 1, 100)]  # fmt: skip
        write_jsonl(folder / "systems" / run / "metrics.jsonl", rows)
    ((_, head, rows),) = curves._of_runs(folder, kept.asked(folder))
    assert head == {"run": "a", "seeds": [0, 1], "directions": ["a-en"]}
    # Steps that both have, with the losses of both; 0.5 s at 100 tokens a second are 50 a step.
    row = {"nll": [3.0, 2.8], "by_direction": [[3.0], [2.8]], "tokens": 50}
    assert rows == [{"step": 100, **row}, {"step": 200, **row}]
    assert read_json(folder / "seconds.json")["a"] == 0.5


def test_rows_of_runs_are_kept_with_their_sizes(folder: Path) -> None:
    """Keeps two runs of results/frontier, one of which ended before the step of the comparison."""
    base = folder.parents[1]
    for path in (folder / "curves").iterdir():
        path.unlink()
    dense = ("dense", "'MLP_WIDTH = 384'")
    routed = ("moe_8", "'MLP_WIDTH = 192', 'transformer.Transformer.moe_every = 1'")
    runs = {"dense": dense, "routed": routed, "late": dense}
    text = "\n".join(
        f"[[run]]\nname = '{name}'\ngin = ['gin_configs/tatoeba_102/{gin}.gin']\n"
        f"bindings = ['WIDTH = 64', 'HEADS = 2', {more}]"
        for name, (gin, more) in runs.items()
    )
    (folder / "runs.toml").write_text(text, encoding="utf-8")
    for number, name in enumerate(runs):
        last = 100 if name == "late" else 200
        tokens = {"source_tokens": [30.0], "target_tokens": [20.0]}
        row = {"nll": [2.123456], "by_direction": [[2.0, 2.2 + number]], "train": tokens}
        rows = [{"step": step, **row, "seconds": 1.0} for step in range(50, last + 1, 50)]
        head = {"run": name, "seeds": [0], "parameters": 7, "directions": ["a-en", "b-en"]}
        write_jsonl(base / "rows" / f"{name}.jsonl", [head, *rows])
    (base / "docs").mkdir()
    (base / "docs" / "results.md").write_text(f"{summary.BEGIN}\n{summary.END}\n", "utf-8")
    assert main(["keep", "made", f"--base={base}", f"--results={folder.parent}"]) == 0
    found = {curve.run: curve for curve in curves.read(folder)}
    assert set(found) == {"dense", "routed"}
    assert (found["routed"].width, found["routed"].experts, found["routed"].every) == (64, 8, 1)
    # The same work a token but for the router: 8 logits of 64 products, in 4 layers, forward and
    # twice backward, of 64 rows of 48 pieces.
    router = 3 * 4 * 2 * 64 * 8 * (64 * 48)
    assert found["routed"].flops - found["dense"].flops == router
    rows = read_jsonl(folder / "curves" / "dense.jsonl")[1:]
    assert rows[0] == {"step": 50, "nll": [2.12346], "tokens": 50}
    assert [row["step"] for row in rows if "by_direction" in row] == [200]
