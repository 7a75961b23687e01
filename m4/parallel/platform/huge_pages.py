"""Huge pages for the process's memory, kept from step to step.

XLA's CPU runtime allocates a step's temporaries with malloc at every step. In pages of 4 KB that is
a fault each, 97,000 a step of a small model; in pages of 2 MB nearly none. The kernel finds huge
pages slowly where other processes have left few, so freed memory is kept. glibc does both on
request, and reads the request only when a process starts (docs/performance.md, "On CPUs").
"""

import os
import platform
import sys
from pathlib import Path

from m4.parallel.platform import signals
from m4.parallel.platform.hardware import gpu_expected

TUNABLES = "GLIBC_TUNABLES"
HUGE = "glibc.malloc.hugetlb=1"  # madvise(MADV_HUGEPAGE); glibc 2.35, older ones ignore it
KEPT = ":".join(
    (
        "glibc.malloc.mmap_max=0",  # large memory, too, comes from the heap,
        "glibc.malloc.arena_max=1",  # which all threads share, as those of threads hold little,
        f"glibc.malloc.trim_threshold={4 * 2**30}",  # and whose end is kept up to 4 GiB
    )
)
# With more threads than these, they might wait for the one heap: not measured.
KEPT_CPUS = 8
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def wanted(kernel: Path = KERNEL) -> bool:
    """Tells if to request them: on Linux with glibc, where programs may get huge pages.

    A GLIBC_TUNABLES that is set already stays as it is.
    """
    if gpu_expected():  # it has a step's temporaries, and one heap would slow threads that feed it
        return False
    if sys.platform != "linux" or TUNABLES in os.environ or platform.libc_ver()[0] != "glibc":
        return False
    return kernel.is_file() and "[never]" not in kernel.read_text()


def request() -> str:
    """Returns the value of GLIBC_TUNABLES."""
    return f"{HUGE}:{KEPT}" if len(os.sched_getaffinity(0)) <= KEPT_CPUS else HUGE


def restart_with_huge_pages() -> None:
    """Replaces the process by itself with the request in its environment, once; else returns."""
    if wanted():
        os.environ[TUNABLES] = request()
        with signals.blocked():
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
