"""Progress of long work: a bar on a terminal or in a notebook, lines elsewhere.

with ProgressBar("train", 100, "steps") as bar:
    for step in range(100):
        bar.update(step + 1, f"loss {loss:.3f}")
"""

import math
import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_PER_LINE = 10.0  # where there is no terminal
_SECONDS_PER_REDRAW = 0.2  # in a notebook
_BAR_WIDTH = 24


class ProgressBar:
    """What is done of a total, the rate and the time left.

    The rate counts this process's work only: work resumed at step 40 did not do the first 40. It
    begins with the first `update`: compiling the first step, before that, happens once.
    The first `update` or the `with` statement shows it; `close` ends it, early too, and may be
    called twice. Updates after that are ignored.

    Args:
        stream: where to write. None: standard output as it is when the bar is made.
    """

    def __init__(self, name: str, total: int, unit: str = "steps", stream: TextIO | None = None):
        self.name, self.total, self.unit = name, total, unit
        self._stream = stream or sys.stdout
        self._notebook = stream is None and _in_notebook()
        self._start = time.monotonic()
        self._first: int | None = None
        self._first_time = self._start
        self._last_shown = 0.0
        self._done = 0
        self._text = ""
        self._seconds_left: float | None = None
        self._progress: Progress | None = None
        self._opened = self._closed = False

    def __enter__(self) -> "ProgressBar":
        self._open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close(failed=error[0] is not None)

    def update(
        self, done: int, text: str = "", total: int | None = None, left: float | None = None
    ) -> None:
        """Sets what is done, not what was added.

        Args:
            text: anything else to show: a loss, tokens/s.
            total: the new total, where some of the work turned out not to be needed.
            left: seconds left, where steps are not all alike; None: by the rate so far;
                NaN: not known.
        """
        if self._closed:
            return
        self._open()
        if self._first is None:
            self._first, self._first_time = done, time.monotonic()
        self.total = self.total if total is None else total
        self._done, self._text, self._seconds_left = done, text, left
        if self._progress is not None:
            self._redraw(self._progress)
        elif time.monotonic() - self._last_shown > (
            _SECONDS_PER_REDRAW if self._notebook else _SECONDS_PER_LINE
        ):
            self._write_line()

    def close(self, *, failed: bool = False) -> None:
        """Shows the last state, unless the work failed without a terminal: its error follows."""
        if self._closed:
            return
        self._closed = True
        if self._progress is not None:
            self._progress.stop()
        elif self._opened and not failed:
            self._write_line()
        if self._notebook and self._opened:
            print(file=self._stream, flush=True)

    def _open(self) -> None:
        if self._opened or self._closed:
            return
        self._opened = True
        if self._notebook or not self._stream.isatty():
            return
        from rich.console import Console  # slow to import, and only terminals need it
        from rich.markup import escape
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=Console(file=self._stream),
        )
        self._progress.start()
        self._task = self._progress.add_task(
            escape(self.name), total=self.total, unit=self.unit, text="", left="left ?"
        )

    def _redraw(self, progress: "Progress") -> None:
        left = ", ".join([f"left {self._left()}", *self._rate()])
        progress.update(
            self._task, completed=self._done, total=self.total, text=self._text, left=left
        )

    def _worked(self) -> int:
        return self._done - (self._first or 0)

    def _left(self) -> str:
        if self._seconds_left is not None:
            known = not math.isnan(self._seconds_left)
            return duration(self._seconds_left) if known else "?"
        if self._worked() <= 0:
            return "?"
        seconds = (time.monotonic() - self._first_time) / self._worked()
        return duration(seconds * (self.total - self._done))

    def _rate(self) -> list[str]:
        seconds = time.monotonic() - self._first_time
        if self._worked() <= 0 or seconds <= 0 or self.unit == "%":  # of unlike work
            return []
        rate = self._worked() / seconds
        return [f"{rate:,.0f} {self.unit}/s" if rate >= 10 else f"{rate:.2f} {self.unit}/s"]

    def _write_line(self) -> None:
        self._last_shown = time.monotonic()
        times = [duration(self._last_shown - self._start)]
        if self._done < self.total:
            times.append(f"left {self._left()}")
        text = f"  {self._text}" if self._text else ""
        line = f"{self._done}/{self.total} {self.unit}{text}  [{', '.join(times + self._rate())}]"
        if self._notebook:
            # A notebook's output has no cursor, but returns to the line's start; trailing spaces
            # cover what a longer line left.
            full = _BAR_WIDTH * min(self._done, self.total) // max(self.total, 1)
            bar = "█" * full + "░" * (_BAR_WIDTH - full)
            print(f"\r{f'{self.name} {bar} {line}':<100}", end="", file=self._stream, flush=True)
        else:
            print(f"{self.name}: {line}", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """ "1:05", "2:03:00": minutes and seconds, with hours where there are any."""
    whole = round(max(seconds, 0))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _in_notebook() -> bool:
    """Whether IPython runs as the kernel of a notebook, which shows standard output."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
