"""Times of steps: what counts, and what does not; and the speeds that MFU divides by."""

import jax
import pytest

from m4.train.measuring import step_clock
from m4.train.measuring.step_clock import Flops, StepClock


class Time:
    """Stand-in for the module `time`."""

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
    assert clock.row(2)["step_seconds"] == 1.0  # the mean of 0 and 2


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("TPU v4", "bfloat16", 275e12),
        ("TPU v3", "float32", 61.5e12),  # half a chip; float32 is rounded to bfloat16
        ("TPU v5 lite", "bfloat16", 197e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float32", 495e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA L40S", "bfloat16", None),
        ("NVIDIA L4", "float32", 60e12),
        ("Tesla T4", "float32", 8.1e12),
        ("cpu", "float32", None),
    ],
)
def test_peaks_of_device_kinds(kind: str, dtype: str, peak: float | None) -> None:
    assert step_clock.stated_peak(kind, dtype) == peak


def test_every_chip_that_is_planned_for_has_jaxs_name() -> None:
    assert set(step_clock._TPUS.values()) == set(step_clock.CHIPS)


def test_fake_devices_share_the_measured_peak_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 1e9 < step_clock.measured_peak("float32") < 1e15
    monkeypatch.setattr(step_clock, "measured_peak", lambda dtype: 5.0)
    assert step_clock.peak_flops(jax.devices(), "float32") == 5.0
