"""Samplers: how often each direction is drawn. One file a sampler, a plain function.

To add one: write one file whose function fits `Sampler`, and name it in gin.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Sampler(Protocol):
    """Numbers of examples -> rates that sum to 1, in the same order."""

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]: ...


class Phase(NamedTuple):
    """From `first_step` on, directions are drawn at these rates; one without a rate is not."""

    first_step: int
    rates: dict[str, float]
