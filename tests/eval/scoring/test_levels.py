import re

import pytest

from m4.data.directions import side_of
from m4.eval.scoring.levels import DEFAULT_LEVELS, ResourceLevels
from m4.settings import SettingError


def test_levels():
    sizes = (3000, 2999, 1000, 999)
    assert [DEFAULT_LEVELS.of(n) for n in sizes] == ["high", "medium", "medium", "low"]


def test_levels_that_overlap_are_refused():
    message = "ResourceLevels.low_resource_below = 9: must be at most high_resource_from = 3"
    with pytest.raises(SettingError, match=re.escape(message)):
        ResourceLevels(high_resource_from=3, low_resource_below=9)


def test_groups_of_directions():
    assert [side_of(d) for d in ("gl-en", "en-gl", "gl-pt")] == ["xx->en", "en->xx", "xx->yy"]
    for bad in ("gl", "gl-", "en-b-c", "gl-gl"):
        with pytest.raises(ValueError, match="must be two languages as 'en-xx'"):
            side_of(bad)
