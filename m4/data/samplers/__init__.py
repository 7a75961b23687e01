"""Samplers: how often each direction is drawn. One file a sampler, a plain function.

To add one: write one file whose function fits `Sampler`, and name it in gin.
"""

from __future__ import annotations

from typing import Protocol


class Sampler(Protocol):
    """Numbers of examples -> rates that sum to 1, in the same order."""

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]: ...
