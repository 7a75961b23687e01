"""A step that stalls is reported once, with its stacks; the heartbeat is of runs that move."""

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest

from m4.train.measuring import watchdog
from m4.train.measuring.step_clock import StepClock


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 0.5)


def a_step_that_waits_for_ever(ended: threading.Event) -> None:
    ended.wait()


def until(condition: object) -> None:
    end = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stalled_step_is_reported_once_with_all_stacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, ended = StepClock(None, time.time(), {}), threading.Event()
    other = threading.Thread(target=a_step_that_waits_for_ever, args=(ended,))
    other.start()
    try:
        with watchdog.watched(clock, tmp_path, 12.5):
            clock.step, clock.phase = 7, "data"
            clock.since = time.monotonic()
            until(lambda: (tmp_path / "stalls").is_dir() and [*(tmp_path / "stalls").iterdir()])
            last = (tmp_path / "heartbeat.json").read_bytes()
            time.sleep(0.1)
            # A run that does not move has no heartbeat.
            assert (tmp_path / "heartbeat.json").read_bytes() == last
    finally:
        ended.set()
        other.join()
    (report,) = (tmp_path / "stalls").iterdir()
    assert report.name == "step_7.process_0.txt"
    text = report.read_text(encoding="utf-8")
    assert text.startswith("step 7 has been running for 0 s (phase data, process 0; ")
    assert "in a_step_that_waits_for_ever" in text
    assert "in test_a_stalled_step_is_reported_once_with_all_stacks" in text
    said = capsys.readouterr().err
    assert said.count("step 7 has been running") == 1
    assert text in said
    beat = json.loads((tmp_path / "heartbeat.json").read_text(encoding="utf-8"))
    assert (beat["step"], beat["phase"], beat["started"]) == (7, "end", 12.5)
    assert watchdog.first_start(tmp_path) == 12.5


def test_compiling_evaluating_and_saving_are_no_stalls(tmp_path: Path) -> None:
    clock = StepClock(None, time.time(), {})
    for phase in ("compile", "evaluate", "save"):
        with watchdog.watched(clock, tmp_path, 0.0), clock.pause(phase):
            first = (tmp_path / "heartbeat.json").read_bytes()
            time.sleep(0.1)
            until(lambda: (tmp_path / "heartbeat.json").read_bytes() != first)  # noqa: B023
            beat = json.loads((tmp_path / "heartbeat.json").read_text(encoding="utf-8"))
            assert beat["phase"] == phase
    assert not (tmp_path / "stalls").exists()


def test_a_pause_that_hangs_is_a_stall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = StepClock(None, time.time(), {})
    clock.step = 7
    with watchdog.watched(clock, tmp_path, 0.0), clock.pause("save"):
        until((tmp_path / "stalls").is_dir)
        until(lambda: "(phase" in capsys.readouterr().err)
    (report,) = (tmp_path / "stalls").iterdir()
    assert report.read_text(encoding="utf-8").startswith("save at step 7 has been running for")


@pytest.mark.parametrize("pausing", [False, True])
def test_typical_steps_and_the_longest_pause_are_what_counts(tmp_path: Path, pausing: bool) -> None:
    """Ten times them is longer than STALL_SECONDS here."""
    clock = StepClock(None, time.time(), {})
    clock.since -= 100.0
    clock.ended()
    clock.longest["evaluate"] = 100.0
    pause = clock.pause("evaluate") if pausing else contextlib.nullcontext()
    with watchdog.watched(clock, tmp_path, 0.0), pause:
        clock.since = time.monotonic() - 900.0
        time.sleep(0.1)
        assert not (tmp_path / "stalls").exists()
        clock.since = time.monotonic() - 1100.0
        until((tmp_path / "stalls").is_dir)


def test_a_damaged_heartbeat_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heartbeat.json").write_text("{")
    before = time.time()
    assert before <= watchdog.first_start(tmp_path) <= time.time()
    assert "heartbeat.json: damaged" in capsys.readouterr().err


def test_a_job_that_was_interrupted_has_not_finished(tmp_path: Path) -> None:
    clock = StepClock(None, time.time(), {})
    with pytest.raises(KeyboardInterrupt), watchdog.watched(clock, tmp_path, 1.0):
        raise KeyboardInterrupt
    beat = watchdog.heartbeat(tmp_path)
    assert beat is not None
    assert beat.phase == "interrupted"
    assert beat.ended(beat.time)
    assert not beat.silent(beat.time + 1e6)
