"""Whether a process is one of several of a job, and how it finds the others. Without JAX."""

from collections.abc import Mapping
from typing import NamedTuple


class DistributedOptions(NamedTuple):
    """How a process joins the others.

    Attributes:
        coordinator_address: "host:port" of process 0. process_count: of the job. process_index: of
            this one. All None: JAX asks the cluster (Cloud TPU, GKE, Slurm, Open MPI).
        heartbeat_seconds: without a heartbeat for so long a process counts as dead.
        join_timeout_s: to wait for all processes at start-up.
    """

    coordinator_address: str | None
    process_count: int | None
    process_index: int | None
    heartbeat_seconds: int
    join_timeout_s: int


# Who types an address starts the processes himself; a cluster may be slow to.
_START_SECONDS, _CLUSTERS_START_SECONDS = 45, 300


def distributed_options(
    environment: Mapping[str, str],
    *,
    multiprocess: bool,
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    heartbeat_seconds: int,
    join_timeout_s: int | None = None,
) -> DistributedOptions | None:
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
    if join_timeout_s is not None and join_timeout_s < 1:
        raise ValueError(f"--start_seconds={join_timeout_s}: must be at least 1")
    if multiprocess and given:
        raise ValueError(f"--multiprocess finds out what {', '.join(given)} says: give one of them")
    if process_count == 1 and given == ["--process_count"]:
        return None
    if not given:
        first = environment.get("JAX_PLATFORMS", "").split(",")[0]
        if multiprocess or first == "tpu":
            start = join_timeout_s or _CLUSTERS_START_SECONDS
            return DistributedOptions(None, None, None, heartbeat_seconds, start)
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
    start = join_timeout_s or _START_SECONDS
    return DistributedOptions(
        coordinator_address, process_count, process_index, heartbeat_seconds, start
    )
