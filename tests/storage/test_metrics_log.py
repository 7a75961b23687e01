"""What a job says and writes while it works."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from m4.storage import metrics_log
from m4.storage.metrics_log import Metrics, Stage, duration, read_metrics


@pytest.mark.parametrize(
    ("seconds", "text"),
    # 59.6 rounds up to a minute; 7383 = 2 * 3600 + 3 * 60 + 3; a clock set back is no time.
    [(0, "0:00"), (5.2, "0:05"), (59.6, "1:00"), (65, "1:05"), (7383, "2:03:03"), (-4, "0:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Clock:
    """time.monotonic, set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics_log.time, "monotonic", clock)
    return clock


def test_without_a_terminal_a_stage_is_a_line_every_ten_seconds(clock: Clock) -> None:
    stream = io.StringIO()
    with Stage("train", 100, stream=stream) as stage:
        for done in range(41, 71):
            clock.now += 1.0
            stage.update(done, f"loss {done}")
    # Resumed at 41 after a second. After 12 s, 11 steps are done and 48 are left: 48 * 12 / 11 =
    # 52 s; after 23 s, 22 and 37: 37 * 23 / 22 = 39 s; at the end, 29 and 30: 30 * 30 / 29 = 31 s.
    assert stream.getvalue().splitlines() == [
        "train: 41/100 steps  loss 41  [0:01, left ?]",
        "train: 52/100 steps  loss 52  [0:12, left 0:52]",
        "train: 63/100 steps  loss 63  [0:23, left 0:39]",
        "train: 70/100 steps  loss 70  [0:30, left 0:31]",
    ]


def test_work_that_is_not_needed_leaves_the_total(clock: Clock) -> None:
    stream = io.StringIO()
    with Stage("baselines", 100, stream=stream) as stage:
        stage.update(0)
        clock.now += 20.0
        stage.update(20, total=60)
        clock.now += 5.0
    # 20 of 60 in 20 s: 40 are left for 40 s, 50 s when 25 have gone by.
    assert stream.getvalue().splitlines() == [
        "baselines: 0/100 steps  [0:00, left ?]",
        "baselines: 20/60 steps  [0:20, left 0:40]",
        "baselines: 20/60 steps  [0:25, left 0:50]",
    ]


def test_a_stage_that_fails_says_nothing_more(clock: Clock) -> None:
    stream = io.StringIO()

    def work() -> None:
        with Stage("decode", 2, "sentences", stream) as stage:
            stage.update(1)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert stream.getvalue() == "decode: 1/2 sentences  [0:00, left ?]\n"


def test_on_a_terminal_a_stage_is_a_bar(clock: Clock) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Stage("train [dense]", 2, stream=stream) as stage:
        stage.update(1, "loss [1]")
        clock.now += 3
        stage.update(2, "loss [2]")
    # Square brackets are text, not rich's markup.
    assert "train [dense]" in stream.getvalue()
    assert "loss [2]" in stream.getvalue()


def test_rows_are_json_and_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    with Metrics(tmp_path, tensorboard=False) as metrics:
        metrics.write(1, {"loss": 2.5, "bad": float("nan"), "worse": float("inf")})
        # Written at once: a job that is killed has said what it knew.
        assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5, "bad": None, "worse": None}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_rows_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": float(step)} for step in (2, 4, 4, 6)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 8, "lo')  # killed in this line
    with Metrics(tmp_path, resume_step=4, tensorboard=False) as metrics:
        metrics.write(6, {"loss": 0.0})
    assert read_metrics(tmp_path) == [*rows[:3], {"step": 6, "loss": 0.0}]


def test_there_may_be_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_tensorboard_gets_the_same(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        metrics.write(1, {"nll/en-gl": 2.5})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"nll/en-gl" in events.read_bytes()


def test_without_a_folder_metrics_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Metrics(None, resume_step=3) as metrics:
        metrics.write(4, {"nll": 1.0})
    assert not list(tmp_path.iterdir())
