"""How loops are compiled by Numba; without Numba they run in Python, much slower."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import numba
except ImportError:
    numba = None
    warnings.warn(
        "Numba is not installed: batches are packed in plain Python, some 300 times slower",
        stacklevel=2,
    )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled when first called, and kept next to its file or in the user's cache folder.

    What a compiled function calls must be in its own file, or never change (`permutation.mix`):
    Numba's cache looks at that file only, and a change elsewhere would go unnoticed.
    """
    if numba is None:
        return _interpreted(function)
    # nogil: meanwhile other threads run, training among them.
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # nowhere to write, as in a container without a home: compiled every time
        return numba.njit(nogil=True)(function)


def _interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with np.errstate(over="ignore"):  # 64 bits wrap around, as when compiled
            return function(*args)

    return call
