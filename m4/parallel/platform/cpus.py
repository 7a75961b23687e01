"""The CPUs that this process may use."""

import os
import sys


def available_cpus() -> list[int]:
    """Their numbers, ascending. Only Linux reports which; elsewhere all of them."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
