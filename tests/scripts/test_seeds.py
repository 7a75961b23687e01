"""`scripts/seeds.py`: a seed of a program mapped over seeds trains as `m4 train` with that seed."""

import json
from pathlib import Path

import numpy as np
import pytest

from m4.storage import safetensors
from m4.storage.steps import complete_steps
from scripts import seeds
from tests.shared import TINY, m4, tiny_run

THREEFRY = "--gin.experiment.Training.rng='threefry2x32'"


@pytest.mark.slow
@pytest.mark.thorough
def test_each_seed_trains_as_alone(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    data = f"{tiny_run(tmp_path_factory)}/data"
    words = [f"--gin_file={TINY}", f"--model_dir={tmp_path}/3", THREEFRY]
    more = ["--gin.experiment.Training.seed=3", f"--gin.experiment.Data.data_dir='{data}'"]
    m4("train", *words, *more).ok()
    lines = (tmp_path / "3" / "metrics.jsonl").read_text().splitlines()
    alone = [row["dev/nll"] for row in map(json.loads, lines) if "dev/nll" in row][-1]

    run = {"name": "tiny", "gin": [str(TINY)], "seeds": [0, 3], "steps": 4, "evaluate": [2]}
    arguments = seeds.parser().parse_args(["-", f"--corpus={data}", f"--out={tmp_path}"])
    seeds.train({**run, "keep": 1}, arguments)

    about, *rows = map(json.loads, (tmp_path / "tiny.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == [2, 4]
    # Products of mapped programs have other orders of additions.
    np.testing.assert_allclose(rows[-1]["nll"][1], alone, rtol=1e-4)
    assert abs(rows[-1]["nll"][0] - alone) > 1e-3  # seeds differ by more than that
    arrays = safetensors.read(tmp_path / "tiny.0.safetensors")
    assert sum(array.size for array in arrays.values()) == about["parameters"]
    safetensors.write(tmp_path / "given.safetensors", arrays, {"step": "3"})
    m4("checkpoint", "convert", str(tmp_path / "3"), f"--output={tmp_path}/made",
              f"--weights={tmp_path}/given.safetensors").ok()  # fmt: skip
    assert complete_steps(tmp_path / "made" / "checkpoints") == [3]  # the file's, not the run's
