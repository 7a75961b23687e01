"""Memory and time used so far by a process, from Linux' /proc, for the benchmarks."""

import time
from pathlib import Path
from typing import Any

_OWN = Path("/proc/self")


def memory() -> dict[str, int]:
    """Returns resident megabytes: current, peak, and current without pages of files.

    The system takes those pages back when it needs them.
    """
    lines = (_OWN / "status").read_text().splitlines()
    # VmHWM instead of getrusage, which begins with the parent's memory.
    names = {"VmRSS": "rss_mb", "VmHWM": "peak_rss_mb", "RssAnon": "rss_anon_mb"}
    found = {line.split(":")[0]: line.split()[1:2] for line in lines}
    return {label: int(found[name][0]) // 1024 for name, label in names.items()}


def device() -> dict[str, Any]:
    """Returns the first device, and the peak of its memory in megabytes (None on CPUs)."""
    import jax

    first = jax.devices()[0]
    used = (first.memory_stats() or {}).get("peak_bytes_in_use")
    return {"device": first.device_kind, "peak_device_mb": used and used // 10**6}


class Meter:
    """Sums the time that this process's first thread spends between begin and end.

    seconds: wall time. cpu_seconds: of all threads. thread_seconds: CPU time of the first one.
    queued_seconds: it was ready, but other work had the cores. The rest of its seconds is
    waiting for the disk, if it waits for nothing else. read_gigabytes: from the disk, with
    what the system read ahead.
    """

    def __init__(self) -> None:
        names = ("seconds", "cpu_seconds", "thread_seconds", "queued_seconds", "read_gigabytes")
        self.spent: dict[str, float] = dict.fromkeys(names, 0.0)

    def begin(self) -> None:
        # Reading /proc takes as long as a small batch: before the clocks here, after them below.
        self._began = {**_waited(), **_clocks()}

    def end(self) -> dict[str, float]:
        """Adds the time since `begin`."""
        now = {**_clocks(), **_waited()}
        took = {name: value - self._began[name] for name, value in now.items()}
        for name, value in took.items():
            self.spent[name] += value
        return took

    def report(self) -> dict[str, Any]:
        """Returns the sums, with the rest as disk_seconds."""
        busy = self.spent["thread_seconds"] + self.spent["queued_seconds"]
        return {**self.spent, "disk_seconds": self.spent["seconds"] - busy}


def _clocks() -> dict[str, float]:
    return {
        "seconds": time.perf_counter(),
        "cpu_seconds": time.process_time(),
        "thread_seconds": time.thread_time(),
    }


def _waited() -> dict[str, float]:
    queued = (_OWN / "schedstat").read_text().split()[1]
    io = dict(line.split(": ") for line in (_OWN / "io").read_text().splitlines())
    return {"queued_seconds": int(queued) / 1e9, "read_gigabytes": int(io["read_bytes"]) / 1e9}
