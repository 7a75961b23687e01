"""gin_configs/tatoeba_102/: three models that can be compared, checked without their corpus."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from m4.experiment import Experiment, identity
from tests.command_line import experiment_of, m4

FOLDER = Path(__file__).parents[1] / "gin_configs" / "tatoeba_102"
NAMES = ("dense", "moe_8", "moe_64")


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Experiment]:
    texts = tmp_path_factory.mktemp("tatoeba")
    return {name: experiment_of(FOLDER / f"{name}.gin", f"TEXT_DIR = '{texts}'") for name in NAMES}


def settings(experiment: Experiment) -> dict[str, Any]:
    assert isinstance(experiment.model, functools.partial)
    return dict(experiment.model.keywords)


def without_folders(value: Any) -> Any:
    """Without the run folders, which baselines have taken over."""
    if isinstance(value, dict):
        return {name: without_folders(of) for name, of in value.items() if name != "model_dir"}
    return value


def test_they_differ_in_experts_alone(experiments: dict[str, Experiment]) -> None:
    rest = set()
    for experiment in experiments.values():
        about = without_folders(identity(experiment))
        for name in ("moe", "mlp_width"):
            del about["model"][name]
        del about["training"]["router_z_loss_factor"]  # of experts
        rest.add(json.dumps(about, sort_keys=True))
    assert len(rest) == 1
    assert len({experiment.model_dir for experiment in experiments.values()}) == 3
    experts = {name: moe and moe.keywords["num_experts"] for name, moe in
               ((name, settings(one)["moe"]) for name, one in experiments.items())}  # fmt: skip
    assert experts == {"dense": None, "moe_8": 8, "moe_64": 64}


def test_a_token_has_the_same_work_in_all(experiments: dict[str, Experiment]) -> None:
    """Every other layer has experts, of which a token takes two: on average one and a half."""
    widths = {name: settings(experiment)["mlp_width"] for name, experiment in experiments.items()}
    assert widths["dense"] == 1.5 * widths["moe_8"] == 1.5 * widths["moe_64"]


@pytest.mark.parametrize("name", NAMES)
def test_they_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, bilingual models and decoding, as `m4 demo --dry_run` checks them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tatoeba").mkdir()
    said = m4("demo", f"--gin_file={FOLDER}/{name}.gin", "--gin.TEXT_DIR=tatoeba", "--dry_run")
    assert said.status == 0, said.err
    assert said.out.splitlines()[-1].startswith("demo: the config is right")
    assert [path.name for path in tmp_path.iterdir()] == ["tatoeba"]
