"""The cores that this process may use."""

import os
import sys


def own_cores() -> list[int]:
    """Their numbers, ascending; only Linux says which, elsewhere they are all."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
