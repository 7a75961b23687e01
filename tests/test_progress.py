"""A progress bar on a terminal, in a notebook and elsewhere."""

import io
from types import SimpleNamespace

import pytest

from m4 import progress
from m4.progress import ProgressBar, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    # 59.6 rounds up to a minute; 7383 = 2 * 3600 + 3 * 60 + 3; a clock set back is no time.
    [(0, "0:00"), (5.2, "0:05"), (59.6, "1:00"), (65, "1:05"), (7383, "2:03:03"), (-4, "0:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces time.monotonic by a clock that the test sets."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


def test_without_a_terminal_it_is_a_line_every_ten_seconds(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    with ProgressBar("train", 100, stream=stream) as bar:
        clock.now += 60.0
        for done in range(41, 71):
            bar.update(done, f"loss {done}")
            clock.now += 2.0
    # Resumed: step 41, the first here, has taken a minute, to compile. Six steps in 12 s are 0.50 a
    # second, and 53 are left for 106 s; at the end 29 steps have taken 60 s, 0.48 a second, and 30
    # are left: 30 * 60 / 29 = 62 s.
    assert stream.getvalue().splitlines() == [
        "train: 41/100 steps  loss 41  [1:00, left ?]",
        "train: 47/100 steps  loss 47  [1:12, left 1:46, 0.50 steps/s]",
        "train: 53/100 steps  loss 53  [1:24, left 1:34, 0.50 steps/s]",
        "train: 59/100 steps  loss 59  [1:36, left 1:22, 0.50 steps/s]",
        "train: 65/100 steps  loss 65  [1:48, left 1:10, 0.50 steps/s]",
        "train: 70/100 steps  loss 70  [2:00, left 1:02, 0.48 steps/s]",
    ]


def test_on_a_terminal_it_is_a_bar(clock: SimpleNamespace) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with ProgressBar("train [dense]", 2, stream=stream) as bar:
        bar.update(1, "loss [1]")
        clock.now += 3
        bar.update(2, "loss [2]")
    # Square brackets are text, not rich's markup.
    assert "train [dense]" in stream.getvalue()
    assert "loss [2]" in stream.getvalue()
