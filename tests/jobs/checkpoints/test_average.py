"""`m4 average`: the mean of several checkpoints' parameters as a run that all jobs read."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from m4 import config
from m4.build import build
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.jobs.checkpoints.average import mean
from m4.jobs.corpus import open_vocabulary
from m4.parallel.mesh import make_mesh
from m4.storage.checkpoints import Checkpoints
from tests.command_line import Said, m4


def params(run: Path, step: int | None = None) -> list[np.ndarray]:
    experiment = config.load([run / "config.gin"], model_dir=run).experiment()
    model = build(experiment, open_vocabulary(experiment)).model
    tree, _, _ = restore_params(model, run / "checkpoints", step)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def averaged(run: Path, *arguments: object) -> Said:
    return m4("average", run, *arguments)


@pytest.fixture(scope="module")
def made(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("average") / "mean"
    averaged(trained, "--last=3", f"--output={output}").ok()
    return output


def test_it_is_the_mean_in_float64_and_the_same_every_time(
    trained: Path, made: Path, tmp_path: Path
) -> None:
    steps = [params(trained, step) for step in (1, 2, 3)]
    found = params(made)
    for leaf, *of in zip(found, *steps, strict=True):
        expected = np.mean(np.stack(of).astype(np.float64), axis=0)
        np.testing.assert_allclose(leaf, expected, rtol=1e-7, atol=1e-7)
        assert leaf.dtype == of[0].dtype
    assert any(not np.array_equal(leaf, last) for leaf, last in zip(found, steps[2], strict=True))
    averaged(trained, "--steps=3,1,2", f"--output={tmp_path / 'b'}").ok()
    for leaf, other in zip(found, params(tmp_path / "b"), strict=True):
        np.testing.assert_array_equal(leaf, other)
    # Again in the same folder: it stays. Another mean there is refused.
    before = sorted((made / "checkpoints" / "3").rglob("*"))
    averaged(trained, "--last=3", f"--output={made}").ok()
    assert sorted((made / "checkpoints" / "3").rglob("*")) == before
    mistake = averaged(trained, "--last=2", f"--output={made}").mistake
    assert f"{made}: has the mean of other checkpoints" in mistake
    step = tmp_path / "b" / "checkpoints" / "3"
    array = next((step / "params").rglob("ocdbt.process_0/d/*"))
    array.write_bytes(array.read_bytes()[:-1])
    mistake = averaged(trained, "--last=3", f"--output={tmp_path / 'b'}").mistake
    assert f"{step}: damaged (params/ocdbt.process_0/d/" in mistake
    assert mistake.endswith("remove it, and the mean is made again")


def test_shards_are_averaged_where_they_are() -> None:
    split = NamedSharding(make_mesh(expert=4, data=2), PartitionSpec("expert"))
    host = [np.random.default_rng(n).normal(size=(8, 3)).astype(np.float32) for n in range(5)]
    found = mean({"w": jax.device_put(x, split), "b": jnp.float32(n)} for n, x in enumerate(host))
    assert found["w"].sharding.is_equivalent_to(split, 2)
    np.testing.assert_array_equal(
        found["w"], np.mean(np.stack(host).astype(np.float64), axis=0).astype(np.float32)
    )
    assert float(found["b"]) == 2.0


def test_of_fewer_checkpoints_all_are_taken(trained: Path, tmp_path: Path) -> None:
    said = averaged(trained, "--last=9", f"--output={tmp_path / 'mean'}").ok()
    assert "the mean of steps 1, 2, 3; next: m4 eval" in said.out
    assert "--last=9 of 3 checkpoints that stayed" in said.err
    # A mean has no optimizer's state: no run is resumed from it.
    mistake = m4("train", f"--model_dir={tmp_path / 'mean'}", "--gin.TRAIN_STEPS=4").mistake
    assert "is a mean of checkpoints, without an optimizer's state" in mistake


def test_mistakes_are_one_line(trained: Path, tmp_path: Path) -> None:
    def mistake(run: Path, *arguments: object) -> str:
        return averaged(run, *arguments).mistake

    assert "no config.gin there; train first" in mistake(tmp_path, "--last=2")
    assert "--last=1: must be 2 or more" in mistake(trained, "--last=1")
    assert f"{trained}: 1 checkpoint; a mean is of two or more" in mistake(trained, "--steps=2")
    assert "no checkpoint of step 7; there are 1, 2, 3" in mistake(trained, "--steps=2,7")

    # Another vocabulary, then other shapes.
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    with Checkpoints(run / "checkpoints", keep=9) as store:
        note: dict[str, Any] = store.note(3)
        tree = {"embedder": {"embedding": jnp.ones((4, 2))}}
        store.save(4, {"params": tree}, {**note, "vocabulary": "another"})
        store.save(5, {"params": tree}, note)
    for step, said in ((4, "trained with another vocabulary"), (5, "belongs to another config")):
        found = mistake(run, f"--steps=3,{step}", f"--output={tmp_path / str(step)}")
        assert f"{run}/checkpoints/{step}" in found
        assert said in found
        assert not list((tmp_path / str(step)).glob("checkpoints/*"))
