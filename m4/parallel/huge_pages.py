"""Huge pages for the process's memory, kept from step to step.

XLA's CPU runtime takes the memory of a step's temporaries from malloc anew at every step. In pages
of 4 KB that is a fault each, 97,000 a step of a small model; in pages of 2 MB nearly none. Huge
pages are found again slowly where other processes have left few, so what is freed is not given
back. glibc does both on request, and reads the request only when a process starts.
(docs/performance.md, "Huge pages".)
"""

import os
import platform
import sys
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
HUGE = "glibc.malloc.hugetlb=1"  # madvise(MADV_HUGEPAGE); glibc 2.35, older ones ignore it
KEPT = ":".join(
    (
        "glibc.malloc.mmap_max=0",  # large memory, too, comes from the heap,
        "glibc.malloc.arena_max=1",  # which all threads share, as those of threads hold little,
        f"glibc.malloc.trim_threshold={4 * 2**30}",  # and whose end is kept up to 4 GiB
    )
)
# Where more threads than these may run at once they might wait for the one heap: not measured.
KEPT_CORES = 8
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def wanted(kernel: Path = KERNEL) -> bool:
    """Whether asking helps: Linux with glibc, where programs are given huge pages.

    Who has set GLIBC_TUNABLES already has chosen.
    """
    if sys.platform != "linux" or TUNABLES in os.environ or platform.libc_ver()[0] != "glibc":
        return False
    return kernel.is_file() and "[never]" not in kernel.read_text()


def request() -> str:
    """What is asked for."""
    return f"{HUGE}:{KEPT}" if len(os.sched_getaffinity(0)) <= KEPT_CORES else HUGE


def restart_with_huge_pages() -> None:
    """Replaces the process by itself with the request in its environment, once; else returns."""
    if wanted():
        os.environ[TUNABLES] = request()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
