"""Uniform sampling: every direction is drawn equally often."""

from m4.data.samplers import check_sizes
from m4.settings import configurable


@configurable
def uniform(sizes: dict[str, int]) -> dict[str, float]:
    """Returns equal rates for any sizes, so that small languages repeat most."""
    check_sizes(sizes)
    return dict.fromkeys(sizes, 1.0 / len(sizes))
