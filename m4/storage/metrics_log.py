"""What a job says while it works: stages with a rate and the time left, and metrics in files.

Metrics go to `metrics.jsonl` (one row a log step) and to TensorBoard. TensorBoard's files are
written by tensorboardX: tf.summary would cost every training process TensorFlow's 400 MB.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tensorboardX import SummaryWriter

from m4.storage.files import write_text

# Where there is no terminal, a line of progress is written this often.
_LINE_SECONDS = 10.0


def duration(seconds: float) -> str:
    """ "1:05", "2:03:00": minutes and seconds, with hours where there are any."""
    whole = round(max(seconds, 0))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Stage:
    """One stage of a job: a bar on a terminal, a line every ten seconds elsewhere.

    Use as a context manager; `update` with what is done so far. The rate is over this process's
    own work, so that a resumed stage does not count what was there.
    """

    def __init__(self, name: str, total: int, unit: str = "steps", stream: TextIO | None = None):
        self.name, self.total, self.unit = name, total, unit
        self._stream = stream or sys.stdout
        self._terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._first: int | None = None
        self._last_line = 0.0
        self._done = 0
        self._text = ""
        self._progress: Progress | None = None

    def __enter__(self) -> "Stage":
        if self._terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TextColumn("left {task.fields[left]}"),
                console=Console(file=self._stream),
            )
            self._progress.start()
            self._task = self._progress.add_task(
                escape(self.name), total=self.total, unit=self.unit, text="", left="?"
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        elif error[0] is None:
            self._line()

    def update(self, done: int, text: str = "", total: int | None = None) -> None:
        """`done` units of `total`, and what else there is to say (a loss, tokens/s).

        A total that is given is the new one: some of the work turned out not to be needed.
        """
        if self._first is None:
            self._first = done
        if total is not None:
            self.total = total
        self._done, self._text = done, text
        if self._progress is not None:
            self._progress.update(
                self._task,
                completed=done,
                total=self.total,
                text=escape(text),
                left=self._left(),
            )
        elif time.monotonic() - self._last_line > _LINE_SECONDS:
            self._line()

    def _left(self) -> str:
        worked = self._done - (self._first or 0)
        if worked <= 0:
            return "?"
        seconds = (time.monotonic() - self._start) / worked * (self.total - self._done)
        return duration(seconds)

    def _line(self) -> None:
        self._last_line = time.monotonic()
        elapsed = duration(self._last_line - self._start)
        left = "" if self._done >= self.total else f", left {self._left()}"
        text = f"  {self._text}" if self._text else ""
        print(
            f"{self.name}: {self._done}/{self.total} {self.unit}{text}  [{elapsed}{left}]",
            file=self._stream,
            flush=True,
        )


class Metrics:
    """Rows {"step": ..., name: number} to `metrics.jsonl` and to `tensorboard/`.

    Opened again at `resume_step`, rows of later steps (of work that was lost) are removed first,
    so that a resumed run leaves the file that an uninterrupted one would have left. A folder None:
    nothing is written (another process does it).
    """

    def __init__(self, folder: Path | None, *, resume_step: int = 0, tensorboard: bool = True):
        self._file = self._board = None
        if folder is None:
            return
        self._path = Path(folder) / "metrics.jsonl"
        kept = [row for row in read_metrics(folder) if row["step"] <= resume_step]
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a", encoding="utf-8")
        if tensorboard:
            self._board = SummaryWriter(
                str(Path(folder) / "tensorboard"), purge_step=resume_step + 1
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row; NaN and infinity are written as null, which JSON knows."""
        if self._file is None:
            return
        row: dict[str, Any] = {"step": step}
        for name, value in values.items():
            number = float(value)
            row[name] = number if abs(number) < float("inf") else None
            if self._board is not None:
                self._board.add_scalar(name, number, step)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder's metrics.jsonl; a last line cut off by a kill is left out."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
