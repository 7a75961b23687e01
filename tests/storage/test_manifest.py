"""A checkpoint of several files."""

import contextlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from m4.storage import checkpoints, manifest
from m4.storage.checkpoints import Checkpoints, shapes


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
