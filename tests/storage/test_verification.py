"""A checkpoint that is not as it was written is never used silently; the step before it is."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from m4.settings import InputError
from m4.storage import checksums, manifest
from m4.storage import steps as module
from m4.storage.checkpoints import Checkpoints, Removed, shapes
from m4.storage.steps import latest_step, whole_step


def tree(factor: float = 1.0) -> dict:
    kernel = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    return {"wi": {"kernel": jnp.asarray(kernel * factor)}, "scale": jnp.ones(4)}


def saved(folder: Path, *steps: int) -> Path:
    """Checkpoints of these steps; those of step n are n times the first ones."""
    with contextlib.closing(Checkpoints(folder, keep=len(steps))) as store:
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
    module._warned.clear()
    return Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


def files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def is_used_or_harmless(folder: Path) -> bool:
    """Checks that the chosen step is step 1, or step 2 with the values that it was given."""
    step = whole_step(folder)
    assert step is not None
    items = {name: shapes(tree()) for name in ("params", "optimizer", "average")}
    with contextlib.closing(Checkpoints(folder, read_only=True)) as store:
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
    "swapped": lambda path, other: (
        path.write_bytes(other.read_bytes()) if path != other else path.unlink()
    ),
    "a bit": lambda path, other: flip(path, 0),
    "another bit": lambda path, other: flip(path, 1),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_of_any_kind_is_named_and_the_step_before_used(
    folder: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    other = folder / "2" / "params" / "_METADATA"
    for path in files(folder / "2"):
        before, inside = path.read_bytes(), path.relative_to(folder / "2").as_posix()
        DAMAGE[how](path, other)
        if path.exists() and path.read_bytes() == before:
            continue
        if "/" in inside and not inside.startswith("sha256/commit"):
            assert whole_step(folder) == 1, inside
            named = manifest.problem(epath.Path(folder / "2")) or ""
            assert inside in named or inside.startswith("sha256/")
            assert f"damaged ({named})" in capfd.readouterr().err
        else:  # orbax's marks of the step, whose content is not read
            assert is_used_or_harmless(folder)
        path.write_bytes(before)


def test_writers_move_a_damaged_step_aside_and_readers_leave_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = next((folder / "2" / "optimizer").rglob("d/*"))
    damaged.write_bytes(damaged.read_bytes()[::-1])
    assert whole_step(folder, used=True) == 2  # readers need neither optimizer nor its moments
    with pytest.raises(InputError, match=r"2: damaged \(optimizer/.*is not what was written\)$"):
        whole_step(folder, 2)
    assert whole_step(folder) == 1
    assert (folder / "2").is_dir()
    with contextlib.closing(Checkpoints(folder)) as store:
        assert store.latest == 1
        store.save(2, {"params": tree(7)}, {})
    assert "2: damaged (optimizer/" in capfd.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "2.damaged"]
    assert whole_step(folder) == 2


def test_a_folder_whose_every_step_is_damaged_is_left_as_it_is(folder: Path) -> None:
    for step in ("1", "2"):
        (folder / step / "params" / "_METADATA").unlink()
    each = r"; 2 is damaged \(params/_METADATA: missing\); 1 is damaged \(params/_METADATA: miss"
    with pytest.raises(InputError, match="no checkpoint is whole" + each):
        Checkpoints(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_fast_verification_compares_sizes_and_small_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    large = {"kernel": jnp.asarray(np.random.default_rng(1).normal(size=(200, 200)))}
    with contextlib.closing(Checkpoints(folder)) as store:
        for step in (1, 2):
            store.save(step, {"params": large}, {})
    path = max(files(folder / "2"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[::-1])
    assert whole_step(folder) == 1
    monkeypatch.setattr(checksums._Choice, "level", "fast")
    assert whole_step(folder) == 2
    # What a reader finds out then is one line, not orbax's.
    with (
        contextlib.closing(Checkpoints(folder, read_only=True)) as store,
        pytest.raises(InputError, match=r"2: damaged|2: cannot be read") as said,
    ):
        store.restore(2, {"params": shapes(large)})
    assert "\n" not in str(said.value)
    path.write_bytes(path.read_bytes()[:-1])
    assert whole_step(folder) == 1


def test_a_step_that_training_removes_while_it_is_read_is_said_to_be_removed(folder: Path) -> None:
    with contextlib.closing(Checkpoints(folder, read_only=True)) as store:
        shutil.rmtree(folder / "2")
        with pytest.raises(Removed, match="was removed while it was read"):
            store.restore(2, {"params": shapes(tree())})


@pytest.mark.parametrize("text", ["[]", "{", '{"init_timestamp_nsecs": "x"}'])
def test_orbax_file_of_another_kind_is_damage_like_any_other(
    folder: Path, capsys: pytest.CaptureFixture, text: str
) -> None:
    (folder / "2" / "_CHECKPOINT_METADATA").write_text(text)
    assert whole_step(folder) == 1
    with contextlib.closing(Checkpoints(folder, read_only=True)) as store:
        assert store.note(1) == {"step": 1}
    with contextlib.closing(Checkpoints(folder)) as store:
        assert store.latest == 1
    assert (folder / "2.damaged").is_dir()
    for line in capsys.readouterr().err.splitlines():
        assert re.search(r"2: damaged \(.*/_CHECKPOINT_METADATA: damaged \(.*step 1 is used", line)


def test_orbax_file_of_an_older_step_is_compared_by_whoever_writes(folder: Path) -> None:
    (folder / "1" / "_CHECKPOINT_METADATA").write_text("[]")
    with contextlib.closing(Checkpoints(folder)) as store:
        assert store.latest == 2
    assert (folder / "1.damaged").is_dir()


def test_a_full_disk_at_a_save_is_one_error_with_the_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
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
from m4.storage import manifest
from m4.storage.checkpoints import Checkpoints
manifest.write_whole = lambda step: os.kill(os.getpid(), signal.SIGKILL)
store = Checkpoints(sys.argv[1])
store.save(3, {"params": {"a": jnp.ones(3)}}, {"step": 3})
store.wait()
"""


def test_a_step_appears_with_its_manifest_or_not_at_all(folder: Path) -> None:
    """Killed at the last moment before the step has its name."""
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(folder)], check=False)
    assert killed.returncode == -9
    assert latest_step(folder) == whole_step(folder) == 2
