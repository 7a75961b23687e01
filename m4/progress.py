"""Progress of long work: a bar on a terminal, lines elsewhere.

with ProgressBar("train", 100, "steps") as bar:
    for step in range(100):
        bar.update(step + 1, f"loss {loss:.3f}")
"""

import dataclasses
import math
import sys
import time
from typing import Any, TextIO

_SECONDS_PER_LINE = 10.0  # seconds between lines without a terminal
_BAR_WIDTH = 24


@dataclasses.dataclass
class ProgressBar:
    """Progress of some work: the part done, its rate and the time left.

    The rate counts the work of this process from the first `update` on, without the compilation
    of the first step. The `with` statement or the first `update` shows the bar. The unit "%" has
    no rate.
    """

    name: str
    total: int
    unit: str = "steps"
    stream: TextIO | None = None

    def __post_init__(self) -> None:
        self._stream = self.stream or sys.stdout
        self._start = self._first_time = time.monotonic()
        self._first: int | None = None  # time of the first update
        self._done, self._text = 0, ""
        self._seconds_left: float | None = None
        self._last_shown = 0.0
        self._opened = self._closed = False
        self._rich: Any = None  # rich's bar on a terminal

    def __enter__(self) -> "ProgressBar":
        self._open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close(failed=error[0] is not None)

    def update(
        self, done: int, text: str = "", total: int | None = None, left: float | None = None
    ) -> None:
        """Sets the amount done so far, and a new total; does nothing after `close`.

        `left` is the seconds left if steps take different times; NaN means unknown.
        """
        if self._closed:
            return
        self._open()
        if self._first is None:
            self._first, self._first_time = done, time.monotonic()
        self.total = self.total if total is None else total
        self._done, self._text, self._seconds_left = done, text, left
        if self._rich is not None:
            left_and_rate = ", ".join([f"left {self._left()}", *self._rate()])
            count = f"{done}/{self.total} {self.unit} {text}"
            self._rich.update(0, completed=done, total=self.total, text=count, left=left_and_rate)
        elif time.monotonic() - self._last_shown > _SECONDS_PER_LINE:
            self._write_line()

    def close(self, *, failed: bool = False) -> None:
        """Shows the last state, unless the work failed: then the line of its error follows."""
        if self._closed:
            return
        self._closed = True
        if self._rich is not None:
            self._rich.stop()
        elif self._opened and not failed:
            self._write_line()

    def _open(self) -> None:
        if not self._opened and self._stream.isatty():
            self._rich = _rich_bar(self._stream)
            self._rich.start()
            self._rich.add_task(self.name, total=self.total, text="", left="left ?")
        self._opened = True

    def _worked(self) -> tuple[int, float]:
        """Returns what this process has done, and the seconds that it took."""
        return self._done - (self._first or 0), time.monotonic() - self._first_time

    def _left(self) -> str:
        if self._seconds_left is not None:
            return "?" if math.isnan(self._seconds_left) else duration(self._seconds_left)
        worked, seconds = self._worked()
        return duration(seconds / worked * (self.total - self._done)) if worked > 0 else "?"

    def _rate(self) -> list[str]:
        worked, seconds = self._worked()
        if worked <= 0 or seconds <= 0 or self.unit == "%":
            return []
        rate = worked / seconds
        return [f"{rate:,.0f} {self.unit}/s" if rate >= 10 else f"{rate:.2f} {self.unit}/s"]

    def _write_line(self) -> None:
        self._last_shown = time.monotonic()
        times = [duration(self._last_shown - self._start)]
        if self._done < self.total:
            times.append(f"left {self._left()}")
        text = f"  {self._text}" if self._text else ""
        line = f"{self._done}/{self.total} {self.unit}{text}  [{', '.join(times + self._rate())}]"
        print(f"{self.name}: {line}", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Returns a duration as minutes and seconds, with hours if any: "1:05", "2:03:00"."""
    whole = round(max(seconds, 0))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _rich_bar(stream: TextIO) -> Any:
    from rich.console import Console  # slow to import, and only terminals need it
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    name = TextColumn("{task.description}", style="bold", markup=False)
    text, left = (TextColumn(f"{{task.fields[{one}]}}", markup=False) for one in ("text", "left"))
    bar, elapsed = BarColumn(bar_width=_BAR_WIDTH), TimeElapsedColumn()
    return Progress(name, bar, text, elapsed, left, console=Console(file=stream))
