"""Compiles loops with Numba."""

import functools
from collections.abc import Callable
from typing import Any


class _Compiled:
    """A function that is compiled at its first call.

    Commands that only translate never call one, and importing Numba would take an eighth of the
    time until `m4 translate` answers.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any) -> Any:
        # A compiled function calls others of its file by their names there.
        names = self._function.__globals__
        for name, one in [*names.items()]:
            if isinstance(one, _Compiled):
                names[name] = one.compiled
        return self.compiled(*args)

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        import numba  # seconds

        # nogil lets other threads run meanwhile, such as training.
        try:
            return numba.njit(cache=True, nogil=True)(self._function)
        except RuntimeError:  # no folder is writable, as in a container without a home
            return numba.njit(nogil=True)(self._function)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function at its first call, and keeps the result for later processes.

    The functions that it calls must be in its own file, or never change (`permutation.mix`):
    Numba's cache looks at that file only, and a change elsewhere would go unnoticed.
    """
    return _Compiled(function)
