"""Short runs have the numbers that are recorded in golden.json (see the package's docstring)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden_run import golden
from tests.golden_run.cases import CASES


@pytest.mark.slow
def test_no_number_has_changed(tmp_path: Path) -> None:
    golden.check([*CASES], tmp_path)
