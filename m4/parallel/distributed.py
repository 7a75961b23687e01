"""One job in several processes: joining, agreeing, work done by the primary, and ending.

Each host has one process, which runs the same program on its own devices; JAX joins them
(`jax.distributed`). Only process 0, the primary, writes files, except for shards of checkpoints.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax

# JAX has no public name for the service that joins processes; orbax and others also use this one.
from jax._src import distributed

from m4.parallel.distributed_options import DistributedOptions
from m4.parallel.platform import signals
from m4.parallel.platform.hardware import code_digest, package_version
from m4.parallel.platform.jax_setup import check_accelerator
from m4.settings import InputError, first_line

# Maximum seconds that the primary stays after an error.
_LINGER_SECONDS = 5.0
_ENDED = "m4/ended/"
# A barrier needs a limit; no job waits a week.
_LONGEST_SECONDS = 7 * 24 * 3600
_POLL_SECONDS = 10.0
# Exit status of a process that has lost another one; not 2, which means a user's mistake.
PEER_LOST_STATUS = 1
PEER_LOST = (
    "another process of the job has ended or cannot be reached, so this one ends too; start all of "
    "them again: training resumes from the latest checkpoint"
)
_PEER_LOST_WORDS = re.compile(
    r"Gloo|coordination|heartbeat|Connection (closed|reset)|preempted", re.I
)


_Work = TypeVar("_Work", bound=Callable[..., Any])


class PeerLost(Exception):
    """Another process of the job is gone."""


# `peer_lost` recognizes some of these.
PEER_LOST_ERRORS = (PeerLost, jax.errors.JaxRuntimeError)


@dataclasses.dataclass
class _State:
    calls: int = 0  # Number of exchanges and barriers so far, equal in all processes.
    alone: bool = False  # the primary works for the others (`on_primary_then_broadcast`)
    linger_seconds: float = _LINGER_SECONDS


_state = _State()


def join(options: DistributedOptions) -> None:
    """Joins the other processes of the job, before JAX is used.

    From here on, only the primary writes to standard output; all processes report errors.

    Raises:
        InputError: The job's processes are unknown, or an accelerator cannot be used.
        PeerLost: The others did not join in time.
    """
    # Until then, processes that have ended must not count as dead.
    _state.linger_seconds = min(_LINGER_SECONDS, options.heartbeat_seconds / 2)
    # JAX's own handler would swallow SIGTERM, even if its service is not used. The training
    # loop's handler makes the processes agree on the step (`m4.train.run`).
    jax.config.update("jax_enable_preemption_service", False)
    given: dict[str, Any] = {}
    where = options.coordinator_address or "the cluster's own settings"
    who, index = "this process", options.process_index
    if options.coordinator_address is not None:
        given = {
            "coordinator_address": options.coordinator_address,
            "num_processes": options.process_count,
            "process_id": index,
            "cluster_detection_method": "deactivate",
        }
        who = f"process {index}"
        if index == 0:
            _check_port(options.coordinator_address)
    waiting = f"{who} waits for the others at {where}, for {options.join_timeout_s} s"
    notice = threading.Timer(_POLL_SECONDS, print, (waiting,), {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    try:
        # If the others do not come, JAX nearly always aborts the process itself.
        jax.distributed.initialize(
            **given,
            initialization_timeout=options.join_timeout_s,
            heartbeat_timeout_seconds=options.heartbeat_seconds,
        )
    except jax.errors.JaxRuntimeError as error:
        # Not a user's mistake: machines may come late, and the job can be started again.
        within = f"within {options.join_timeout_s} s (join_timeout_s): {first_line(error)}"
        raise PeerLost(f"the processes did not find each other at {where} {within}") from error
    except (ValueError, OSError, RuntimeError) as error:
        raise InputError(_unknown_processes(options, first_line(error))) from error
    finally:
        notice.cancel()
    # The first exchange has that limit, too (`synchronized`).
    wait_for_all("each other")
    check_accelerator()
    if not is_primary():
        sys.stdout = io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8")


def _unknown_processes(options: DistributedOptions, said: str) -> str:
    if os.environ.get("JAX_PLATFORMS", "").startswith("tpu") and not options.coordinator_address:
        return (
            f"JAX_PLATFORMS=tpu, but JAX finds no TPU slice here ({said}): process_count=1 is one "
            "host alone, JAX_PLATFORMS=cpu the CPU (docs/cloud_tpu.md)"
        )
    return (
        f"the job's processes are not known ({said}): give coordinator_address=HOST:PORT, "
        "process_count=N and process_index=I, or process_count=1 for this one alone"
    )


def _check_port(address: str) -> None:
    """Raises PeerLost for a port in use, with which JAX would crash or two jobs would meet."""
    both, port = socket.has_dualstack_ipv6(), int(address.rpartition(":")[2])
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        # Addresses are reused, so connections of an ended job do not matter.
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        said = f"is the port taken? (coordinator_address; {os.strerror(error.errno or 0)})"
        raise PeerLost(f"process 0 cannot listen at {address}: {said}") from error


def check_joined() -> None:
    """Raises InputError if JAX sees several processes that this one has not joined."""
    if jax.process_count() > 1 and distributed.global_state.client is None:
        count = jax.process_count()
        raise InputError(f"this is one of {count} processes of a slice: multiprocess joins them")


def is_distributed() -> bool:
    """Returns whether the job has more than one process, without using an accelerator."""
    state = distributed.global_state
    return state.client is not None and (state.num_processes or 1) > 1


def is_primary() -> bool:
    """Returns whether this is the process that writes files and prints."""
    return not is_distributed() or jax.process_index() == 0


def on_primary_then_broadcast(what: str, work: Callable[[], Any]) -> Any:
    """Calls `work` on the primary while the others wait; returns its result in all processes.

    Waiting has no limit: a process that dies meanwhile ends the others.

    Args:
        what: Name of the work, for messages of waiting processes.
        work: Function whose result must be JSON.

    Raises:
        ValueError: The work raised it; others get an InputError with its first line.
        PeerLost: Raised in the others if the work raised another error, or one whose exit status is
            not 2.
    """
    client: Any = distributed.global_state.client
    if not is_distributed() or _state.alone:
        return work()
    key = _next_key(what)
    if is_primary():
        _state.alone = True
        try:
            result = work()
        except BaseException as error:
            # All processes return the exit status of a mistake, so that they are not started again.
            mistake = isinstance(error, ValueError) and getattr(error, "status", 2) == 2
            mistake = mistake and signals.status_of(error) is None
            name = "mistake" if mistake else "failure"
            client.key_value_set(key, json.dumps({name: first_line(error)}))
            raise
        finally:
            _state.alone = False
        client.key_value_set(key, json.dumps({"result": result}))
        return result
    answer = json.loads(_wait(client, key, what))
    if "mistake" in answer:
        raise InputError(answer["mistake"])
    if "failure" in answer:
        raise PeerLost(f"process 0 failed: {answer['failure']}")
    return answer["result"]


def by_primary(what: str) -> Callable[[_Work], _Work]:
    """Decorator: the primary calls the function for all (`on_primary_then_broadcast`)."""

    def decorated(work: _Work) -> _Work:
        @functools.wraps(work)
        def call(*given: Any, **more: Any) -> Any:
            return on_primary_then_broadcast(what, lambda: work(*given, **more))

        return cast(_Work, call)

    return decorated


def check_agreement(config: Mapping[str, str]) -> None:
    """Raises InputError, in every process, unless all have the same code, config and devices.

    Different processes would compile different programs, and then wait for each other forever or
    sum unrelated numbers. All call this after `join`, before they compile.
    """
    if (count := jax.process_count()) > 1:
        client: Any = distributed.global_state.client
        key, mine = _next_key("facts"), [socket.gethostname(), facts(config)]
        client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(mine))
        keys = [f"{key}/{index}" for index in range(count)]
        every = [client.blocking_key_value_get(each, 1000 * _LONGEST_SECONDS) for each in keys]
        agree(*zip(*map(json.loads, every), strict=True))


def facts(config: Mapping[str, str]) -> dict[str, str]:
    """Returns the facts that must be the same in all processes, by their names in messages."""
    return {
        "code": code_digest()[:12],
        "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12],
        # From this process's own options; JAX takes that of process 0.
        "process_count": str(distributed.global_state.num_processes or 1),
        "number of devices": str(jax.device_count()),
        "local devices": str(jax.local_device_count()),
        "kind of devices": jax.devices()[0].device_kind,
        **{name: package_version(name) for name in ("jax", "jaxlib", "libtpu")},
        # These versions decide what is compiled.
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }


def agree(hosts: Sequence[str], every: Sequence[Mapping[str, str]]) -> None:
    """Raises InputError, which names the differences, unless all processes have equal facts."""
    said = []
    for name in every[0]:
        column = [each[name] for each in every]
        # The most common value; without a majority, that of process 0.
        usual = Counter(column).most_common(1)[0][0]
        if others := [index for index, value in enumerate(column) if value != usual]:
            who = ", ".join(f"{index} ({hosts[index]})" for index in others)
            found, usual = (value or "not set" for value in (column[others[0]], usual))
            said.append(f"process {who}: {name} {found}, elsewhere {usual}")
    if said:
        said = f"the {len(hosts)} processes do not agree, so nothing is started: {'; '.join(said)}"
        raise InputError(said)


def _next_key(what: str) -> str:
    _state.calls += 1
    return f"m4/{_state.calls}/{what}"


def _wait(client: Any, key: str, what: str) -> str:
    reported = False
    while True:
        try:
            return client.blocking_key_value_get(key, int(1000 * _POLL_SECONDS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if not reported:
            reported = True
            print(f"process {jax.process_index()} waits for process 0: {what}", file=sys.stderr)


def synchronized(jitted: Any, what: str) -> Callable[..., Any]:
    """Returns a jitted function that all processes call together.

    It has a program for each shape of its last argument, the batch. Here processes wait for each
    other's compilation, as the first exchange of a program has a limit of 30 seconds on CPUs.
    """
    programs: dict[Any, Any] = {}

    def call(*arguments: Any) -> Any:
        if not is_distributed():
            return jitted(*arguments)
        batch: dict[str, jax.Array] = arguments[-1]
        key = tuple((name, value.shape) for name, value in sorted(batch.items()))
        if key not in programs:
            programs[key] = jitted.lower(*arguments).compile()
            wait_for_all(what)
        return programs[key](*arguments)

    return call


def wait_for_all(what: str) -> None:
    """Waits for all processes; a process that dies meanwhile ends the others."""
    if is_distributed() and not _state.alone:
        client: Any = distributed.global_state.client
        client.wait_at_barrier(_next_key(what), 1000 * _LONGEST_SECONDS)


def peer_lost(error: BaseException) -> str | None:
    """Returns the message of an error caused by the end of another process, otherwise None."""
    if isinstance(error, PeerLost):
        return first_line(error)  # gin adds more lines
    if isinstance(error, jax.errors.JaxRuntimeError) and _PEER_LOST_WORDS.search(str(error)):
        return f"{PEER_LOST} ({first_line(error)})"
    return None


def shutdown() -> None:
    """Waits for all processes at the end of the work, and disconnects."""
    sys.stdout.flush()
    jax.distributed.shutdown()


def abort_process(status: int) -> None:
    """Ends this process after an error, without waiting for the others.

    The primary, which runs the service that joins processes, lets them report their errors first.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    client = distributed.global_state.client
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(f"{_ENDED}{jax.process_index()}", str(status))
            until = time.monotonic() + _state.linger_seconds
            while is_primary() and time.monotonic() < until:
                if len(client.key_value_dir_get(_ENDED)) == jax.process_count():
                    break
                time.sleep(0.1)
    os._exit(status)
