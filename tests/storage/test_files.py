"""Names that stay in a folder, and arrays of safetensors files."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from m4.storage import safetensors
from m4.storage.files import confined


def test_names_within_a_folder(tmp_path: Path) -> None:
    for name in ("a.txt", "data/a.npy", "...", "a..b"):
        assert confined(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("name", ["", "..", "../a", "a/../../b", "/etc/passwd", "link/a"])
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="which is outside of it"):
        confined(tmp_path / "folder", name)


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
