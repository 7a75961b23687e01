"""How loops are compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled when first called, and kept beside its file or in the user's cache folder.

    What a compiled function calls must be in its own file: numba's cache looks at that one only,
    and a change elsewhere would go unnoticed.
    """
    # nogil: meanwhile other threads go on, training among them.
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # nowhere to write, as in a container without a home: compiled every time
        return numba.njit(nogil=True)(function)
