"""Metrics of training: `metrics.jsonl`, one row a log step, and TensorBoard.

TensorBoard's files are written by tensorboardX: tf.summary would cost every training process
TensorFlow's 400 MB.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from m4.settings import InputError
from m4.storage.files import write_text


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
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise InputError(f"{path} line {number}: not JSON ({error})") from error
    return rows
