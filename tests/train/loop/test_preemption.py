"""Signals end training after the current step; so does the loss of the folder to another job."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from m4.data.corpus import CorpusSpec
from m4.data.stream.stream import Stream
from m4.storage import lease
from m4.storage.steps import latest_step
from m4.storage.store import Disk
from m4.train.loop.preemption import stop_signals
from m4.train.loop.run import Evaluator, Interrupted
from tests.data.corpus import Made
from tests.train.test_step import SHALLOW, mesh_of
from tests.train.trainers import train

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, lease.LEASE_LOST_SIGNAL]


def test_a_lost_lease_has_a_separate_signal() -> None:
    assert len(set(NUMBERS)) == 4


@pytest.mark.parametrize("number", NUMBERS)
def test_signals_are_collected_and_handlers_given_back(number: signal.Signals) -> None:
    others: list[int] = []
    before = signal.signal(number, lambda number, _: others.append(number))
    try:
        with stop_signals() as received:
            signal.raise_signal(number)
            assert (received, others) == ([number], [])
            signal.raise_signal(signal.SIGTERM)  # sent again, as managers of machines do
            assert (received, others) == ([number, signal.SIGTERM], [])
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        others.clear()
        signal.raise_signal(number)
        assert others == [number]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", NUMBERS)
def test_signals_end_at_once_what_has_nothing_to_save(number: signal.Signals) -> None:
    others: list[int] = []
    before = signal.signal(number, lambda number, _: others.append(number))
    try:
        ends = (
            contextlib.nullcontext()  # the lease's own handler says how
            if number == lease.LEASE_LOST_SIGNAL
            else pytest.raises(KeyboardInterrupt)
        )
        with stop_signals(lambda: False) as received:
            with ends:
                signal.raise_signal(number)
            assert (received, others) == ([], [number])
    finally:
        signal.signal(number, before)


def test_a_lost_lease_ends_training_after_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "PERIOD_SECONDS", 0.05)
    lengths = {"inputs": 64, "targets": 64}
    cache = CorpusSpec(Made({"gl": 60}), vocabulary_size=300, lengths=lengths).build(
        tmp_path / "corpus"
    )
    mine = lease.Lease(Disk(f"file://{tmp_path}/store"), "train", "a copy", tmp_path, "MODEL_DIR")

    def lose(_: Any) -> dict[str, float]:
        """Another job takes the folder; waits until this one's thread has noticed."""
        for mark in (tmp_path / "store" / lease.RUNNING).glob("*.json"):
            mark.unlink()
        mine._thread.join()
        return {}

    model = SHALLOW.clone(
        vocab_size=-(-cache.source_vocabulary.size // 8) * 8, moe=None, dropout_rate=0.0
    )
    mine.acquire()
    try:
        # Within the step LeaseLost would leave no state.
        with lease.interrupt_when_lost([mine]), pytest.raises(Interrupted, match="at step 2 "):
            train(
                tmp_path / "model",
                model,
                Stream(cache, seed=1, batch_rows=4),
                mesh_of(1, 1),
                total_steps=50,
                evaluators=[Evaluator(2, lose)],
            )
        assert mine.lost is not None
        assert latest_step(tmp_path / "model" / "checkpoints") == 2
    finally:
        mine.release()
