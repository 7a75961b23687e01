"""A run that is interrupted at any moment and started again is, bit for bit, one that was not."""

import functools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.samplers.learned import Learned
from m4.data.samplers.uniform import uniform
from m4.data.stream.stream import Stream
from m4.storage.checkpoints import Checkpoints
from m4.storage.steps import latest_step
from m4.train.average import averaged
from m4.train.loop import Evaluator, Interrupted
from m4.train.optimizer import adamw
from tests.shared import model_for
from tests.train.test_step import mesh_of
from tests.train.trainers import learned_sampling, timeless_rows, train

ROWS = 8
CHECKPOINT_PERIOD = 3
# Checkpoints and interruptions are between two rows.
LOG_PERIOD = 2


class Interruption(NamedTuple):
    """A signal to the process that trains, `seconds` after its `steps`-th step.

    With 0 steps it comes after the process began to take up the checkpoint.
    """

    number: int
    steps: int
    seconds: float


def run(
    folder: Path, corpus: Path, mesh: Sequence[int], total_steps: int,
    interruption: Interruption | None = None,
) -> None:  # fmt: skip
    """Trains packed batches with dropout, experts, averaged parameters and a learned sampler."""
    cache = Cache(corpus)
    sampler = Learned(start=uniform, step_size=1.0)

    def measure(params: Any) -> dict[str, float]:
        """Returns for each direction a number that changes with the weights.

        It is rounded, because another mesh must draw the same pairs.
        """
        sums = [float(np.abs(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(params)]
        return {f"dev/nll/{name}": 1 + round(sums[i], 2) for i, name in enumerate(cache.directions)}

    left = [0 if interruption is None else interruption.steps]

    def interrupt(_: Any) -> dict[str, float]:
        if interruption is not None and left[0] == 0:
            one = threading.Timer(interruption.seconds, os.kill, (os.getpid(), interruption.number))
            one.daemon = True
            one.start()
        left[0] -= 1
        return {}

    interrupt(None)
    # Groups of four steps: the sampler's rates hold from the next one on.
    make = functools.partial(Stream, seed=1, batch_rows=ROWS)
    stream, sampling = learned_sampling(cache, sampler, total_steps, make, {})
    train(
        folder, model_for(cache, dropout_rate=0.1, directions=len(cache.directions)), stream,
        mesh_of(*mesh), functools.partial(averaged, optimizer=adamw), total_steps=total_steps,
        checkpoint_period=CHECKPOINT_PERIOD, log_period=LOG_PERIOD,
        evaluators=[Evaluator(4, measure), Evaluator(1, interrupt)], sampling=sampling,
    )  # fmt: skip


def run_in_process(*arguments: Any) -> None:
    """Does the process's work, with small groups of steps, so that rates change within a run."""
    from m4.data.stream import stream

    stream._SPAN_ROWS = 4 * ROWS
    try:
        run(*arguments)
    except Interrupted:
        sys.exit(130)


def trained(
    folder: Path, corpus: Path, total_steps: int, meshes: Sequence[Sequence[int]],
    interruptions: Sequence[Interruption] = (),
) -> list[int]:  # fmt: skip
    """Trains on the i-th mesh until the i-th interruption, then to the end; returns the ends."""
    # A server that has imported all of it, and started nothing, makes the processes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ends = []
    for mesh, interruption in zip(meshes, [*interruptions, None], strict=True):
        arguments = (folder, corpus, tuple(mesh), total_steps, interruption)
        process = context.Process(target=run_in_process, args=arguments)
        process.start()
        process.join()
        assert process.exitcode is not None
        ends.append(process.exitcode)
    assert ends[-1] == 0
    assert latest_step(folder / "checkpoints") == total_steps
    return ends


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of the last checkpoint: parameters, optimizer, averages."""
    step = latest_step(folder / "checkpoints")
    assert step is not None
    found = {}
    with Checkpoints(folder / "checkpoints", read_only=True) as store:
        for item in ("params", "optimizer", "average"):
            found |= {f"{item}/{path}": x for path, x in store.read(step, item).items()}
    return found


def assert_bit_equal(folder: Path, whole: Path) -> None:
    assert timeless_rows(folder) == timeless_rows(whole)
    counts = [(path / "atlas.train.json").read_bytes() for path in (folder, whole)]
    assert counts[0] == counts[1]
    ours, theirs = arrays(folder), arrays(whole)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    # And a save that was killed in the middle is cleaned up.
    assert all(path.name.isdecimal() for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_resume_after_sigkill_is_bit_equal(tmp_path: Path, corpus: Cache) -> None:
    """After SIGTERM and at random moments: below, with `make test-thorough`."""
    mesh, interruptions = (2, 2), [Interruption(signal.SIGKILL, 4, 0.0)]
    ends = trained(tmp_path / "parts", corpus.folder, 7, [mesh] * 2, interruptions)
    assert ends == [-signal.SIGKILL, 0]
    trained(tmp_path / "whole", corpus.folder, 7, [mesh])
    assert_bit_equal(tmp_path / "parts", tmp_path / "whole")


def random_interruptions(count: int, seed: int) -> list[Interruption]:
    """Returns interruptions, half by SIGKILL: in steps, evaluations, saves and the start-up."""
    rng = random.Random(seed)
    numbers = [signal.SIGKILL, signal.SIGTERM] * count
    return [
        Interruption(numbers[i], rng.choice([0, 2, 3, 4]), rng.uniform(0.0, 0.3))
        if i % 4
        else Interruption(numbers[i], 0, rng.uniform(0.0, 4.0))
        for i in range(count)
    ]


@pytest.mark.slow
@pytest.mark.thorough
def test_twenty_random_interruptions_are_bit_equal(tmp_path: Path, corpus: Cache) -> None:
    steps, mesh = 60, (2, 2)
    ends = trained(
        tmp_path / "parts", corpus.folder, steps, [mesh] * 21, random_interruptions(20, seed=0)
    )
    print(ends)
    assert sum(end != 0 for end in ends) >= 18, ends
    trained(tmp_path / "whole", corpus.folder, steps, [mesh])
    assert_bit_equal(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.thorough
def test_other_device_counts_resume_within_a_millionth(tmp_path: Path, corpus: Cache) -> None:
    """8 -> 4 -> 2 -> 1 and back: sums over devices are rounded in another order."""
    meshes = [(2, 4), (2, 2), (1, 2), (1, 1), (2, 1), (4, 1), (8, 1)]
    kills = [signal.SIGTERM, signal.SIGKILL] * 3
    interruptions = [Interruption(number, 4, 0.0) for number in kills]
    ends = trained(tmp_path / "parts", corpus.folder, 30, meshes, interruptions)
    assert ends == [130, -signal.SIGKILL] * 3 + [0]
    trained(tmp_path / "whole", corpus.folder, 30, [(2, 4)])
    ours, theirs = timeless_rows(tmp_path / "parts"), timeless_rows(tmp_path / "whole")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    far = 0.0
    for row, other in zip(ours, theirs, strict=True):
        for name in (name for name in row if name.startswith(("loss", "nll", "rate", "share"))):
            far = max(far, abs(row[name] - other[name]) / max(abs(other[name]), 1.0))
    others = arrays(tmp_path / "whole")
    for name, value in arrays(tmp_path / "parts").items():
        if np.issubdtype(value.dtype, np.floating) and name.startswith(("params/", "average/")):
            apart = np.abs(value.astype(np.float64) - others[name]).max()
            far = max(far, float(apart))
    print(far)
    assert far < 1e-6
