"""Runs have the numbers that are recorded in golden.json (see the package's docstring)."""

from pathlib import Path

import pytest

from tests.golden_run import golden
from tests.golden_run.cases import CASES, FULL


@pytest.mark.slow
def test_no_number_has_changed(tmp_path: Path) -> None:
    golden.check(["demo"], tmp_path)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.every_part
def test_no_number_of_other_configs_and_devices_has_changed(tmp_path: Path) -> None:
    golden.check([name for name in CASES if name != "demo"], tmp_path)


@pytest.mark.slow
@pytest.mark.thorough
def test_no_number_of_the_real_configs_has_changed(tmp_path: Path) -> None:
    """The demo's first 40 steps, and the first 20 of tatoeba_102/moe_8.gin."""
    golden.check([*FULL], tmp_path)
