"""The demo's first 40 steps and tatoeba_102/moe_8.gin's first 20 have their recorded numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden_run import golden
from tests.golden_run.cases import FULL


@pytest.mark.slow
@pytest.mark.thorough
def test_no_number_of_the_real_configs_has_changed(tmp_path: Path) -> None:
    golden.check([*FULL], tmp_path)
