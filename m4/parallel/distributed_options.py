"""Whether a process is one of several of a job, and how it finds the others. Without JAX."""

from collections.abc import Mapping
from typing import NamedTuple


class Joining(NamedTuple):
    """How a process joins the others.

    address: "host:port" on which the first process answers, count of processes, index of this one;
    all None: JAX asks the cluster (Cloud TPU, GKE, Slurm, Open MPI).
    heartbeat_seconds: a process that is not heard of for so long is dead.
    start_seconds: for how long the processes wait for each other when the job starts.
    """

    address: str | None
    count: int | None
    index: int | None
    heartbeat_seconds: int
    start_seconds: int


# Who types an address starts the processes himself; a cluster may be slow to.
_START_SECONDS, _CLUSTERS_START_SECONDS = 45, 300


def joining(
    environment: Mapping[str, str],
    *,
    multiprocess: bool,
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    heartbeat_seconds: int,
    start_seconds: int | None = None,
) -> Joining | None:
    """How to join, from the arguments of the command line; None: this process is alone.

    Where JAX is told to use TPUs first (JAX_PLATFORMS=tpu,cpu), the hosts of a slice belong
    together without being told.

    Raises:
        ValueError: arguments that contradict each other, or of which some are missing.
    """
    flags: dict[str, object] = {
        "--coordinator_address": coordinator_address,
        "--process_count": process_count,
        "--process_index": process_index,
    }
    given = [name for name, value in flags.items() if value is not None]
    if heartbeat_seconds < 1:
        raise ValueError(f"--heartbeat_seconds={heartbeat_seconds}: must be at least 1")
    if start_seconds is not None and start_seconds < 1:
        raise ValueError(f"--start_seconds={start_seconds}: must be at least 1")
    if multiprocess and given:
        raise ValueError(f"--multiprocess finds out what {', '.join(given)} says: give one of them")
    if process_count == 1 and given == ["--process_count"]:
        return None
    if not given:
        first = environment.get("JAX_PLATFORMS", "").split(",")[0]
        if multiprocess or first == "tpu":
            start = start_seconds or _CLUSTERS_START_SECONDS
            return Joining(None, None, None, heartbeat_seconds, start)
        return None
    if missing := [name for name in flags if name not in given]:
        raise ValueError(
            f"{', '.join(missing)} must be given with {', '.join(given)}; or --multiprocess alone, "
            "where the cluster tells them"
        )
    assert coordinator_address is not None
    assert process_count is not None
    assert process_index is not None
    host, _, port = coordinator_address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"--coordinator_address={coordinator_address}: must be host:port, a free port of the "
            "first process's host"
        )
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"--process_index={process_index}: must be from 0 to --process_count - 1, which is "
            f"{process_count - 1}"
        )
    start = start_seconds or _START_SECONDS
    return Joining(coordinator_address, process_count, process_index, heartbeat_seconds, start)
