import re

import pytest

from m4.eval.scoring.groups import DEFAULT_LEVELS, ResourceLevels, direction_group
from m4.settings import SettingError


def test_levels():
    sizes = (3000, 2999, 1000, 999)
    assert [DEFAULT_LEVELS.of(n) for n in sizes] == ["high", "medium", "medium", "low"]


def test_levels_that_overlap_are_refused():
    message = "ResourceLevels.low_resource_below = 9: must be at most high_resource_from = 3"
    with pytest.raises(SettingError, match=re.escape(message)):
        ResourceLevels(high_resource_from=3, low_resource_below=9)


def test_groups_of_directions():
    assert [direction_group(d) for d in ("gl-en", "en-gl")] == ["xx->en", "en->xx"]
    for bad in ("gl", "gl-", "en-b-c", "gl-pt"):
        with pytest.raises(ValueError, match="must be 'en-xx' or 'xx-en'"):
            direction_group(bad)
