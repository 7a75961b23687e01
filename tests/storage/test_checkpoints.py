"""Checkpoints: what was saved comes back, in the sharding that is asked for; half ones never."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from m4.parallel.mesh import make_mesh
from m4.storage import checkpoints as module
from m4.storage import manifest
from m4.storage.checkpoints import SCORES_BY_STEP, Checkpoints, shapes
from m4.storage.steps import complete_steps, latest_step

PARAMS = {"wi": {"kernel": np.arange(32, dtype=np.float32).reshape(8, 4)}, "scale": np.ones(4)}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    store = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


def tree(factor: float = 1.0) -> dict:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) * factor, PARAMS)


def test_save_restore_roundtrip(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest is None
    assert latest_step(Path(checkpoints.folder)) is None
    note = {"step": 3, "vocabulary": "abc", "train_pairs": {"gl": 250}, "best": None}
    checkpoints.save(3, {"params": tree(), "optimizer": tree(2.0), "best": tree(3.0)}, note)
    checkpoints.wait()
    assert checkpoints.latest == latest_step(Path(checkpoints.folder)) == 3
    assert checkpoints.note(3) == note
    found = checkpoints.restore(3, {"params": shapes(tree()), "best": shapes(tree())})
    assert set(found) == {"params", "best"}
    for name, factor in (("params", 1.0), ("best", 3.0)):
        jax.tree.map(np.testing.assert_array_equal, found[name], tree(factor))


def test_arrays_are_restored_with_the_given_shardings(checkpoints: Checkpoints) -> None:
    # Saved from one device, read over eight, and the other way round.
    mesh = make_mesh(expert=8, data=1)
    split = NamedSharding(mesh, PartitionSpec("expert"))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = {"wi": {"kernel": split}, "scale": whole}
    checkpoints.save(1, {"params": tree()}, {})
    checkpoints.wait()
    spread = checkpoints.restore(1, {"params": shapes(tree(), shardings)})["params"]
    assert spread["wi"]["kernel"].sharding.is_equivalent_to(split, 2)
    assert spread["wi"]["kernel"].addressable_shards[3].data.shape == (1, 4)
    checkpoints.save(2, {"params": spread}, {})
    checkpoints.wait()
    one = checkpoints.restore(2, {"params": shapes(tree())})["params"]
    assert len(one["wi"]["kernel"].sharding.device_set) == 1
    jax.tree.map(np.testing.assert_array_equal, one, tree())


def test_last_checkpoints_are_kept(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3):
        checkpoints.save(step, {"params": tree(step)}, {})
    checkpoints.wait()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["2", "3"]


def kept(folder: Path, **keep: Any) -> list[int]:
    """Returns the kept steps of 1..6, of dev/nll 6, 2, 5, none, 3, 4, saved by two runs."""
    nll = {1: 6.0, 2: 2.0, 3: 5.0, 5: 3.0, 6: 4.0}
    for steps in (range(1, 4), range(4, 7)):
        store = Checkpoints(folder, **keep)
        for step in steps:
            store.save(step, {"params": tree()}, {}, {"dev/nll": nll[step]} if step in nll else {})
        store.close()
    return complete_steps(folder)


def test_last_periodic_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    assert kept(tmp_path / "a", keep=1) == [6]
    assert kept(tmp_path / "b", keep=1, keep_period=2) == [2, 4, 6]
    assert kept(tmp_path / "c", keep=1, keep_best=2) == [2, 5, 6]
    assert kept(tmp_path / "d", keep=2, keep_best=1, keep_period=3) == [2, 3, 5, 6]


def test_step_that_is_marked_as_best_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks, store = tmp_path / SCORES_BY_STEP, Checkpoints(tmp_path / "checkpoints", keep=1)
    rows = {at: json.dumps({"step": at, "best": True}) + "\n" for at in (1, 4)}
    rows |= {0: json.dumps({"step": 0, "best": False}) + "\n"}
    found = []
    # A file that cannot be read stops no training: what was marked stays.
    for step, text in enumerate((None, rows[1], rows[0] + rows[1], "no JSON", rows[4], ""), 1):
        if text is not None:
            marks.write_text(text, encoding="utf-8")
        store.save(step, {"params": tree()}, {})
        store.wait()
        found.append(complete_steps(tmp_path / "checkpoints"))
    store.close()
    assert found == [[1], [1, 2], [1, 3], [1, 4], [4, 5], [6]]
    assert "scores_by_step.jsonl line 1: damaged (not JSON" in capsys.readouterr().err


def test_saved_step_is_not_saved_again(checkpoints: Checkpoints) -> None:
    for factor in (1.0, 5.0):
        checkpoints.save(1, {"params": tree(factor)}, {"factor": factor})
        checkpoints.wait()
    assert checkpoints.note(1) == {"factor": 1.0}


def test_half_written_step_is_ignored(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {"params": tree()}, {})
    checkpoints.wait()
    # The name under which orbax writes, which a killed job leaves behind.
    (checkpoints.folder / "2.orbax-checkpoint-tmp-7" / "params").mkdir(parents=True)
    again = Checkpoints(Path(checkpoints.folder))
    try:
        assert again.latest == latest_step(Path(checkpoints.folder)) == 1
    finally:
        again.close()


def test_error_names_another_models_arrays(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {"params": tree()}, {})
    checkpoints.wait()
    checkpoints.check_shapes(1, "params", shapes(tree()))
    wider = {**tree(), "wi": {"kernel": jnp.zeros((8, 6))}}
    with pytest.raises(ValueError, match=r"1: wi/kernel is \(8, 4\) there and \(8, 6\) in the"):
        checkpoints.check_shapes(1, "params", shapes(wider))
    with pytest.raises(ValueError, match=r"1: scale is \(4,\) there and missing in the model"):
        checkpoints.check_shapes(1, "params", shapes({"wi": tree()["wi"]}))


def test_reader_creates_no_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    store = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert store.latest is None
    store.close()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_large_checkpoint_is_several_files_and_restored_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILE_BYTES", 1 << 16)
    kernel = np.random.default_rng(0).normal(size=(300, 200)).astype(np.float32)
    tree = {"a": {"kernel": jnp.asarray(kernel)}, "b": jnp.asarray(kernel, jnp.bfloat16)}
    with contextlib.closing(Checkpoints(tmp_path)) as store:
        store.save(1, {"params": tree}, {})
        store.wait()
        found = store.restore(1, {"params": shapes(tree)})["params"]
    written = manifest.files_of(epath.Path(tmp_path / "1")) or {}
    assert len([size for size, _ in written.values() if size > 1 << 14]) >= 3
    np.testing.assert_array_equal(found["a"]["kernel"], kernel)
    np.testing.assert_array_equal(found["b"], tree["b"])
