"""A manifest is of what was written in the end, and made while it is written."""

import contextlib
import hashlib
import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from m4.storage import checkpoints, manifest
from m4.storage.checkpoints import Checkpoints, shapes


def test_a_complete_file_is_hashed_while_another_one_is_still_written(tmp_path: Path) -> None:
    own, item = tmp_path / "params.tmp" / "ocdbt.process_0", tmp_path / "sha256"
    own.mkdir(parents=True)
    item.mkdir()
    (own / "complete").write_bytes(b"1" * 1000)
    (own / "changed").write_bytes(b"2" * 1000)
    with (own / "growing").open("wb") as growing:
        growing.write(b"3" * 1000)
        growing.flush()
        files = manifest.OwnFiles(epath.Path(item), 0)
        until = time.monotonic() + 20
        while time.monotonic() < until and len(files._hashed) < 2:
            time.sleep(0.01)
        assert {Path(name).name for name in files._hashed} == {"complete", "changed"}
        growing.write(b"4" * 1000)
    (own / "changed").write_bytes(b"5" * 1000)
    files.finish()
    assert not files._thread.is_alive()
    assert json.loads((item / "process_0.json").read_text()) == {
        f"params/ocdbt.process_0/{path.name}": [
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        ]
        for path in own.iterdir()
    }


def test_a_large_checkpoint_is_several_files_and_restored_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_FILE_BYTES", 1 << 16)
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


def test_a_save_that_failed_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[manifest.OwnFiles] = []

    class Kept(manifest.OwnFiles):
        def __init__(self, item: epath.Path, process: int) -> None:
            super().__init__(item, process)
            made.append(self)

        def finish(self) -> None:
            raise OSError("no space left")

    monkeypatch.setattr(manifest, "OwnFiles", Kept)
    store = Checkpoints(tmp_path)
    store.save(1, {"params": {"a": jnp.ones(3)}}, {})
    with pytest.raises(OSError, match="no space left"):
        store.wait()
    store.close()
    made[0]._thread.join(20)
    assert not made[0]._thread.is_alive()
