"""Checkpoints: what was saved comes back, and whatever is not as it was written never does.

Arrays come back in the sharding that is asked for. A step that is damaged is never used silently;
the step before it is.
"""

import json
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from m4.parallel.mesh import make_mesh
from m4.settings import InputError
from m4.storage import checksums
from m4.storage import steps as module
from m4.storage.checkpoints import SCORES_BY_STEP, Checkpoints, Removed, shapes
from m4.storage.steps import complete_steps, latest_step, whole_step
from tests.storage.conftest import Capture, Patch

PARAMS = {
    "wi": {"kernel": np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)},
    "scale": np.ones(4, np.float32),
}


def tree(factor: float = 1.0) -> dict:
    return jax.tree.map(lambda x: jnp.asarray(x * factor), PARAMS)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    store = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


def test_save_restore_roundtrip(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest is None
    assert latest_step(Path(checkpoints.folder)) is None
    note = {"step": 3, "vocabulary": "abc", "train_pairs": {"gl": 250}, "best": None}
    checkpoints.save(3, {"params": tree(), "optimizer": tree(2.0), "best": tree(3.0)}, note)
    checkpoints.wait()
    assert latest_step(Path(checkpoints.folder)) == 3
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
    assert spread["wi"]["kernel"].addressable_shards[3].data.shape == (5, 30)
    checkpoints.save(2, {"params": spread}, {})
    checkpoints.wait()
    one = checkpoints.restore(2, {"params": shapes(tree())})["params"]
    assert len(one["wi"]["kernel"].sharding.device_set) == 1
    jax.tree.map(np.testing.assert_array_equal, one, tree())


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
    assert kept(tmp_path / "b", keep=1, keep_period=2) == [2, 4, 6]
    assert kept(tmp_path / "c", keep=1, keep_best=2) == [2, 5, 6]
    assert kept(tmp_path / "d", keep=2, keep_best=1, keep_period=3) == [2, 3, 5, 6]


def test_step_that_is_marked_as_best_is_kept(tmp_path: Path, capsys: Capture) -> None:
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


def test_error_names_another_models_arrays(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {"params": tree()}, {})
    checkpoints.wait()
    checkpoints.check_shapes(1, "params", shapes(tree()))
    wider = {**tree(), "wi": {"kernel": jnp.zeros((8, 6))}}
    with pytest.raises(ValueError, match=r"1: wi/kernel is \(40, 30\) there and \(8, 6\) in the"):
        checkpoints.check_shapes(1, "params", shapes(wider))
    with pytest.raises(ValueError, match=r"1: scale is \(4,\) there and missing in the model"):
        checkpoints.check_shapes(1, "params", shapes({"wi": tree()["wi"]}))


def saved(folder: Path, *steps: int) -> Path:
    """Saves checkpoints of these steps, in which step n has n times the first arrays."""
    with Checkpoints(folder, keep=len(steps)) as store:
        for step in steps:
            items = {"params": tree(step), "optimizer": tree(-step), "average": tree(step / 2)}
            store.save(step, items, {"step": step})
            store.wait()
    return folder


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("two") / "checkpoints", 1, 2)


@pytest.fixture
def folder(tmp_path: Path, two_steps: Path) -> Path:
    module._warn.cache_clear()
    return Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


def files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def is_used_or_harmless(folder: Path) -> bool:
    """Checks that the chosen step is step 1, or step 2 with the values that it was given."""
    step = whole_step(folder)
    assert step is not None
    items = {name: shapes(tree()) for name in ("params", "optimizer", "average")}
    with Checkpoints(folder, read_only=True) as store:
        found, note = store.restore(step, items), store.note(step)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), found["params"], tree(step))
    return jax.tree.all(same) and note == {"step": step}


def flip(path: Path, seed: int) -> None:
    """Flips a bit of a file."""
    draw, content = random.Random(f"{seed} {path.name}"), bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "emptied": lambda path, other: path.write_bytes(b""),
    "halved": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deleted": lambda path, other: path.unlink(),
    "swapped": lambda path, other: path.write_bytes(other.read_bytes()),
    "a bit": lambda path, other: flip(path, 0),
    "another bit": lambda path, other: flip(path, 1),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_of_any_kind_is_named_and_the_step_before_used(
    folder: Path, how: str, capfd: Capture
) -> None:
    other = folder / "2" / "params" / "_METADATA"
    for path in files(folder / "2"):
        before, inside = path.read_bytes(), path.relative_to(folder / "2").as_posix()
        DAMAGE[how](path, other)
        if path.exists() and path.read_bytes() == before:  # `other` has the same content
            path.unlink()
        if "/" in inside and not inside.startswith("sha256/commit"):
            assert whole_step(folder) == 1, inside
            named = module.problem(epath.Path(folder / "2")) or ""
            assert inside in named or inside.startswith("sha256/")
            assert f"damaged ({named})" in capfd.readouterr().err
        else:  # orbax's marks of the step, whose content is not read
            assert is_used_or_harmless(folder)
        path.write_bytes(before)


def test_writers_move_a_damaged_step_aside_and_readers_leave_it(
    folder: Path, capfd: Capture
) -> None:
    damaged = next((folder / "2" / "optimizer").rglob("d/*"))
    damaged.write_bytes(damaged.read_bytes()[::-1])
    assert whole_step(folder, used=True) == 2  # readers need neither optimizer nor its moments
    with pytest.raises(InputError, match=r"2: damaged \(optimizer/.*is not what was written\)$"):
        whole_step(folder, 2)
    assert whole_step(folder) == 1
    assert (folder / "2").is_dir()
    with Checkpoints(folder) as store:
        assert store.latest == 1
        store.save(2, {"params": tree(7)}, {})
    assert "2: damaged (optimizer/" in capfd.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "2.damaged"]
    assert whole_step(folder) == 2


def test_readers_compare_the_parameters_that_are_used(folder: Path) -> None:
    """Readers take the average of the parameters where a run has one."""
    for item, found in (("params", 2), ("average", 1)):
        damaged = next((folder / "2" / item).rglob("d/*"))
        damaged.write_bytes(damaged.read_bytes()[::-1])
        assert whole_step(folder, used=True) == found


def test_a_folder_whose_every_step_is_damaged_is_left_as_it_is(folder: Path) -> None:
    for step in ("1", "2"):
        (folder / step / "params" / "_METADATA").unlink()
    each = r"; 2 is damaged \(params/_METADATA: missing\); 1 is damaged \(params/_METADATA: miss"
    with pytest.raises(InputError, match="no checkpoint is whole" + each):
        Checkpoints(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_fast_verification_compares_sizes_and_small_files_only(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = tmp_path / "checkpoints"
    large = {"kernel": jnp.asarray(np.random.default_rng(1).normal(size=(200, 200)))}
    with Checkpoints(folder) as store:
        for step in (1, 2):
            store.save(step, {"params": large}, {})
    path = max(files(folder / "2"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[::-1])
    assert whole_step(folder) == 1
    monkeypatch.setattr(checksums, "_chosen", "fast")
    assert whole_step(folder) == 2
    # What a reader finds out then is one line, not orbax's.
    with (
        Checkpoints(folder, read_only=True) as store,
        pytest.raises(InputError, match=r"2: damaged|2: cannot be read") as said,
    ):
        store.restore(2, {"params": shapes(large)})
    assert "\n" not in str(said.value)
    path.write_bytes(path.read_bytes()[:-1])
    assert whole_step(folder) == 1


def test_a_step_that_training_removes_while_it_is_read_is_said_to_be_removed(folder: Path) -> None:
    with Checkpoints(folder, read_only=True) as store:
        shutil.rmtree(folder / "2")
        with pytest.raises(Removed, match="was removed while it was read"):
            store.restore(2, {"params": shapes(tree())})


@pytest.mark.parametrize("text", ["[]", "{", '{"init_timestamp_nsecs": "x"}'])
def test_orbax_file_of_another_kind_is_damage_like_any_other(
    folder: Path, capsys: Capture, text: str
) -> None:
    (folder / "2" / "_CHECKPOINT_METADATA").write_text(text)
    assert whole_step(folder) == 1
    with Checkpoints(folder, read_only=True) as store:
        assert store.note(1) == {"step": 1}
    with Checkpoints(folder) as store:
        assert store.latest == 1
    assert (folder / "2.damaged").is_dir()
    for line in capsys.readouterr().err.splitlines():
        assert re.search(r"2: damaged \(.*/_CHECKPOINT_METADATA: damaged \(.*step 1 is used", line)


def test_orbax_file_of_an_older_step_is_compared_by_whoever_writes(folder: Path) -> None:
    (folder / "1" / "_CHECKPOINT_METADATA").write_text("[]")
    with Checkpoints(folder) as store:
        assert store.latest == 2
    assert (folder / "1.damaged").is_dir()


def test_a_full_disk_at_a_save_is_one_error_with_the_folder(tmp_path: Path, capfd: Capture) -> None:
    """A limit on the size of files stands for the full disk: other words of the same kind."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = Checkpoints(tmp_path / "checkpoints")
    # Several, because writes that end after the first failed one print tracebacks of another kind.
    large = {str(i): jnp.asarray(np.random.default_rng(i).normal(size=(50, 50))) for i in range(9)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, before[1]))
        store.save(1, {"params": large}, {})
        with pytest.raises(OSError, match="File too large") as said:
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said.value.filename == str(tmp_path / "checkpoints")
    assert capfd.readouterr().err == ""  # orbax's threads print tracebacks
    store.close()


_KILLED = """
import os, signal, sys
import jax.numpy as jnp
from m4.storage import steps
from m4.storage.checkpoints import Checkpoints
steps.write_whole = lambda step: os.kill(os.getpid(), signal.SIGKILL)
store = Checkpoints(sys.argv[1])
store.save(3, {"params": {"a": jnp.ones(3)}}, {"step": 3})
store.wait()
"""


def test_a_step_appears_with_its_manifest_or_not_at_all(folder: Path) -> None:
    """Killed at the last moment before the step has its name."""
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(folder)], check=False)
    assert killed.returncode == -9
    assert [*folder.glob("3.*")]  # the next process sees nothing half-written
    assert latest_step(folder) == whole_step(folder) == 2
    with Checkpoints(folder) as store:
        assert store.latest == 2
