"""Ctrl-C, SIGTERM and SIGHUP end training after the current step, the same one in all processes.

Processes that stopped at different steps would wait for each other for ever. So each gives its flag
into the step, which adds them up: the sum goes with what the step sends anyway.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m4.parallel.platform import signals

# The name of the flags in a batch, and of their sum in the metrics.
STOP = "stop"


@contextlib.contextmanager
def stop_signals(to_save: Callable[[], bool] = lambda: True) -> Iterator[list[int]]:
    """Collects Ctrl-C, SIGTERM (a preempted machine's notice) and SIGHUP until the step is done.

    An exception in the middle of a step would leave no state to save. A second Ctrl-C interrupts at
    once; without anything `to_save` a signal does what it did before.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        if to_save() and not (received and number == signal.SIGINT):
            received.append(number)
            signals.notice(number)
            return
        handler = before[number]
        if callable(handler):
            handler(number, frame)
        raise KeyboardInterrupt

    before: dict[int, Any] = {n: signal.signal(n, note) for n in signals.not_ignored()}
    try:
        with signals.held(to_save):
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_stop_flags(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the step with `stop_flags` in its batch under STOP, and their sum in its metrics."""

    def run(state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
        rest = dict(batch)
        flags = rest.pop(STOP)
        state, metrics = step(state, rest)
        return state, {**metrics, STOP: jnp.sum(flags)}

    return run


def stop_flags(mesh: Mesh, stop: bool) -> jax.Array:
    """Makes flags, int32 [devices], each on its device: 1 on those of a process that is to stop.

    Sharded over all axes of the mesh: no device of another process has a copy that could differ.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    here = np.array([stop], np.int32)
    return jax.make_array_from_callback((mesh.size,), sharding, lambda _: here)
