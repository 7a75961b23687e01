"""Steps of a run taken again, from a checkpoint of it; nothing is written."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from m4.train.loop.batches import BatchStream, device_batches
from m4.train.loop.guard import StepGuard, left_out_by
from m4.train.loop.program import TrainProgram
from m4.train.state import TrainState
from m4.train.training import Training


def at_step(state: TrainState, step: int) -> TrainState:
    """The state, its number of steps replaced."""
    return dataclasses.replace(
        state, step=jax.device_put(np.asarray(step, np.int32), state.step.sharding)
    )


def replay(
    training: Training,
    program: TrainProgram,
    stream: BatchStream,
    folder: Path,
    saved: Mapping[str, Any],
    state: TrainState,
    before: int,
) -> TrainState:
    """The state before step `before`, as the run in `folder` had it when it came there first: on
    the same mesh bit for bit. state: of a checkpoint, given away; saved: its note."""
    start = int(state.step)
    guard = StepGuard(training, folder, saved, start, state.step.sharding)
    left_out = left_out_by(one for one in guard.bad if one["step"] < before)
    compiled = program.jit(guard.wrap(program.step))
    with (
        program.axis_rules(),
        contextlib.closing(device_batches(program.mesh, stream, start)) as batches,
    ):
        for step in range(start + 1, before):
            batch = next(batches)
            if step in left_out:
                state = at_step(state, step)
                continue
            state, metrics = compiled(state, {**batch, **guard.inputs()})
            jax.block_until_ready(metrics["loss"])
            guard.add(step, metrics)
    return state


def step_metrics(
    program: TrainProgram, stream: BatchStream, state: TrainState, step: int
) -> dict[str, Any]:
    """Loss and gradient norm of a step, with dropout and dropped tokens as in training. state: the
    one before it, given away."""
    with (
        program.axis_rules(),
        contextlib.closing(device_batches(program.mesh, stream, step - 1)) as batches,
    ):
        _, metrics = program.jit()(at_step(state, step - 1), next(batches))
        return {name: float(metrics[name]) for name in ("loss", "gradient_norm")}
