"""Uniform sampling: every direction as often as every other."""

from m4.data.samplers import check_sizes
from m4.settings import configurable


@configurable
def uniform(sizes: dict[str, int]) -> dict[str, float]:
    """Returns equal rates, whatever the sizes; small languages repeat the most."""
    check_sizes(sizes)
    return dict.fromkeys(sizes, 1.0 / len(sizes))
