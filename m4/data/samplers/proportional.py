"""Proportional sampling: every pair is drawn equally often."""

from m4.data.samplers import check_sizes, normalized
from m4.settings import configurable


@configurable
def proportional(sizes: dict[str, int]) -> dict[str, float]:
    """Returns rates n / sum of all n: all languages end an epoch at the same step."""
    check_sizes(sizes)
    return normalized(sizes)
