"""Being asked to stop: Ctrl-C and SIGTERM, taken at the end of a step, the same in all processes.

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

ASKED = "asked"


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM (a preempted machine's notice) until the step is done.

    An exception in the middle of a step would leave no state to save: its memory is reused. A
    second Ctrl-C interrupts at once. Other threads than the main one cannot have handlers. The loss
    of MODEL_DIR to another job is taken in the same way: nothing is saved then, but all processes
    hear of it (`m4.storage.checkpoints`).
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, _frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, lease.LEASE_LOST_SIGNAL)
    kept = {number: signal.signal(number, note) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def with_flags(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, whose batch has `flags` under ASKED, and its metrics their sum, int32."""

    def run(state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
        rest = dict(batch)
        flags = rest.pop(ASKED)
        state, metrics = step(state, rest)
        return state, {**metrics, ASKED: jnp.sum(flags)}

    return run


def flags(mesh: Mesh, asked: bool) -> jax.Array:
    """int32 [devices], each on its device: 1 on those of a process that is asked to stop.

    Split over all axes of the mesh: no device of another process has a copy that could differ.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    here = np.array([asked], np.int32)
    return jax.make_array_from_callback((mesh.size,), sharding, lambda _: here)
