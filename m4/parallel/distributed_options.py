"""Options by which a process finds the others of its job. Does not import JAX."""

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from m4.settings import InputError, SettingError


class DistributedOptions(NamedTuple):
    """Options for joining the other processes."""

    # "host:port" of process 0, given together with process_count and process_index. If all are
    # None, JAX asks the cluster (Cloud TPU, GKE, Slurm, Open MPI).
    coordinator_address: str | None
    process_count: int | None
    process_index: int | None
    heartbeat_seconds: int  # seconds without a heartbeat until a process counts as dead
    join_timeout_s: int  # seconds to wait for all processes at start-up


# With an address, a person starts the processes; a cluster may take longer.
_JOIN_TIMEOUT_S, _CLUSTER_JOIN_TIMEOUT_S = 45, 300


def distributed_options(
    environment: Mapping[str, str], arguments: argparse.Namespace
) -> DistributedOptions | None:
    """Returns the options of the command line, or None if this process is alone.

    If JAX uses TPUs first (JAX_PLATFORMS=tpu,cpu), the hosts of a slice are found as with
    multiprocess. Raises InputError if arguments are impossible, missing or in conflict.
    """
    names = ("coordinator_address", "process_count", "process_index")
    address, count, index = (getattr(arguments, name) for name in names)
    given = [name for name in names if getattr(arguments, name) is not None]
    heartbeat, start = arguments.heartbeat_seconds, arguments.join_timeout_s
    for name, seconds in (("heartbeat_seconds", heartbeat), ("join_timeout_s", start)):
        if seconds is not None and seconds < 1:
            raise SettingError(name, seconds, "at least 1")
    if arguments.multiprocess and given:
        raise InputError(f"multiprocess asks the cluster for {', '.join(given)}: give one of them")
    if count == 1 and given == ["process_count"]:
        return None
    if not given:
        first = environment.get("JAX_PLATFORMS", "").split(",")[0]
        if arguments.multiprocess or first == "tpu":
            start = start or _CLUSTER_JOIN_TIMEOUT_S
            return DistributedOptions(None, None, None, heartbeat, start)
        return None
    if missing := [name for name in names if name not in given]:
        said = f"must be given with {', '.join(given)}; or multiprocess alone"
        raise InputError(f"{', '.join(missing)} {said}, where the cluster knows them")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        allowed = "host:port, a free port of process 0's host"
        raise SettingError("coordinator_address", address, allowed)
    if not 0 <= index < count:
        allowed = f"from 0 to process_count - 1, which is {count - 1}"
        raise SettingError("process_index", index, allowed)
    return DistributedOptions(address, count, index, heartbeat, start or _JOIN_TIMEOUT_S)
