"""Ctrl-C and SIGTERM end training after the current step, the same one in all processes.

Processes that stopped at different steps would wait for each other for ever. So each gives its flag
into the step, which adds them up: the sum goes with what the step sends anyway.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m4.storage import lease

# The name of the flags in a batch, and of their sum in the metrics.
STOP = "stop"


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM (a preempted machine's notice) until the step is done.

    An exception in the middle of a step would leave no state to save: its memory is reused. A
    second Ctrl-C interrupts at once. Only the main thread can have handlers. The loss of MODEL_DIR
    to another job ends training in the same way: nothing is saved then, but all processes learn of
    it (`m4.storage.checkpoints`).
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, _frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, lease.LEASE_LOST_SIGNAL)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_stop_flags(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, whose batch has `stop_flags` under STOP, and its metrics their sum, int32."""

    def run(state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
        rest = dict(batch)
        flags = rest.pop(STOP)
        state, metrics = step(state, rest)
        return state, {**metrics, STOP: jnp.sum(flags)}

    return run


def stop_flags(mesh: Mesh, stop: bool) -> jax.Array:
    """int32 [devices], each on its device: 1 on those of a process that is to stop.

    Sharded over all axes of the mesh: no device of another process has a copy that could differ.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    here = np.array([stop], np.int32)
    return jax.make_array_from_callback((mesh.size,), sharding, lambda _: here)
