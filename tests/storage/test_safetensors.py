"""Arrays come back from a safetensors file as they were, whatever their memory layout."""

from pathlib import Path

import ml_dtypes
import numpy as np

from m4.storage import safetensors


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    kernel = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    arrays = {
        "a/kernel": kernel,
        "a/transposed": kernel.T,
        "a/columns": kernel[:, ::2],
        "half": kernel.astype(ml_dtypes.bfloat16),
        "step": np.asarray(3, np.int32),
        "none": np.zeros((0, 2), np.float32),
    }
    safetensors.write(tmp_path / "x.safetensors", arrays, {"step": "3"})
    found = safetensors.read(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
