"""Files written whole or not at all, and names that stay in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

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
