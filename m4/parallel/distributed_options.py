"""Options by which a process finds the others of its job; without JAX."""

from collections.abc import Mapping
from typing import NamedTuple

from m4.settings import InputError, SettingError


class DistributedOptions(NamedTuple):
    """Options for joining the other processes.

    Attributes:
        coordinator_address: "host:port" of process 0. With it process_count and process_index are
            given; if all are None, JAX asks the cluster (Cloud TPU, GKE, Slurm, Open MPI).
        heartbeat_seconds: Seconds without a heartbeat until a process counts as dead.
        join_timeout_s: Seconds to wait for all processes at start-up.
    """

    coordinator_address: str | None
    process_count: int | None
    process_index: int | None
    heartbeat_seconds: int
    join_timeout_s: int


# With an address a person starts the processes; a cluster may take longer.
_JOIN_TIMEOUT_S, _CLUSTER_JOIN_TIMEOUT_S = 45, 300


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
    """Returns the options of the command line's arguments, or None if this process is alone.

    Where JAX uses TPUs first (JAX_PLATFORMS=tpu,cpu), the hosts of a slice are found as with
    multiprocess.
    """
    arguments: dict[str, object] = {
        "coordinator_address": coordinator_address,
        "process_count": process_count,
        "process_index": process_index,
    }
    given = [name for name, value in arguments.items() if value is not None]
    if heartbeat_seconds < 1:
        raise SettingError("heartbeat_seconds", heartbeat_seconds, "at least 1")
    if join_timeout_s is not None and join_timeout_s < 1:
        raise SettingError("join_timeout_s", join_timeout_s, "at least 1")
    if multiprocess and given:
        raise InputError(f"multiprocess asks the cluster for {', '.join(given)}: give one of them")
    if process_count == 1 and given == ["process_count"]:
        return None
    if not given:
        first = environment.get("JAX_PLATFORMS", "").split(",")[0]
        if multiprocess or first == "tpu":
            start = join_timeout_s or _CLUSTER_JOIN_TIMEOUT_S
            return DistributedOptions(None, None, None, heartbeat_seconds, start)
        return None
    if missing := [name for name in arguments if name not in given]:
        raise InputError(
            f"{', '.join(missing)} must be given with {', '.join(given)}; or multiprocess alone, "
            "where the cluster knows them"
        )
    assert coordinator_address is not None
    assert process_count is not None
    assert process_index is not None
    host, _, port = coordinator_address.rpartition(":")
    if not host or not port.isdecimal():
        allowed = "host:port, a free port of process 0's host"
        raise SettingError("coordinator_address", coordinator_address, allowed)
    if not 0 <= process_index < process_count:
        allowed = f"from 0 to process_count - 1, which is {process_count - 1}"
        raise SettingError("process_index", process_index, allowed)
    start = join_timeout_s or _JOIN_TIMEOUT_S
    return DistributedOptions(
        coordinator_address, process_count, process_index, heartbeat_seconds, start
    )
