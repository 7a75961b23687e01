"""Signals end training after the current step."""

from __future__ import annotations

import signal

import pytest

from m4.train.preemption import stop_signals

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


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
        with stop_signals(lambda: False) as received:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            assert (received, others) == ([], [number])
    finally:
        signal.signal(number, before)
