"""Times of steps: what counts, and what does not."""

import pytest

from m4.train.measuring import step_clock
from m4.train.measuring.step_clock import Flops, StepClock


class Time:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1000.0 + self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(step_clock, "time", time)
    return time


def test_a_row_is_of_the_steps_since_the_last_one(time: Time) -> None:
    # Started 50 s ago; 10 s of steps were saved.
    clock = StepClock(Flops(2.5e9, 1e10), 1050.0, {"seconds_in_steps": 10.0}, devices=3)
    with clock.pause("compile"):
        time.now += 20
    for seconds in (1.0, 3.0):
        with clock.waiting(1):
            time.now += 0.25 * seconds
        clock.dispatched()
        time.now += 0.75 * seconds
        clock.ended()
    with clock.pause("save"):
        time.now += 6
    assert clock.row(3) == pytest.approx(
        {
            "step_seconds": 2.0,
            "step_seconds_deviation": 1.0,
            "data_wait_seconds": 0.5,
            "model_flops": 3 * 2.5e9,
            "mfu": 5e9 / (4.0 * 1e10),
            # 10 + 4 of 50 + 20 + 4 + 6 seconds
            "goodput": 14 / 80,
            "device_seconds": 3 * 14,
        }
    )
    assert clock.note() == {"seconds_in_steps": 14.0}
    assert clock.typical_seconds == 2.0
    assert clock.row(3) == {"model_flops": 3 * 2.5e9, "goodput": 14 / 80, "device_seconds": 42}


def test_a_step_after_a_pause_begins_at_its_end(time: Time) -> None:
    clock = StepClock(None, time.time(), {})
    clock.ended()
    with clock.pause("evaluate"):
        assert clock.phase == "evaluate"
        time.now += 100
    time.now += 2
    clock.ended()
    assert clock.row(2)["step_seconds"] == 1.0  # of 0 and 2
