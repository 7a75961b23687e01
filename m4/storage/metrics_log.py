"""Metrics of training: `metrics.jsonl`, one row a log step, and TensorBoard.

TensorBoard's files are written by tensorboardX: tf.summary would cost every training process
TensorFlow's 400 MB.
"""

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from m4.storage.files import read_jsonl, write_text
from m4.storage.records import count, number, optional, record

# Names of T5X's tags, where the meaning is the same -> m4's name, and the value out of m4's.
T5X_TAGS: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "experts/fraction_tokens_left_behind": ("fraction_tokens_left_behind", float),
    "experts/expert_usage": ("expert_usage", float),
    "experts/router_confidence": ("router_confidence", float),
    "timing/steps_per_second": ("step_seconds", lambda seconds: 1 / max(seconds, 1e-9)),
}
_ROW = record({"step": count, "*": optional(number)})


@dataclasses.dataclass
class Metrics(contextlib.AbstractContextManager["Metrics"]):
    """A log of rows {"step": ..., name: number}, in `metrics.jsonl` and `tensorboard/`.

    TensorBoard has them under `T5X_TAGS`, too. A run that is resumed leaves the file of an
    uninterrupted one. Without a folder nothing is written: another process does it.

    Attributes:
        resume_step: Rows of later steps, of work that was lost, are removed.
        saved: The note of its checkpoint; that other rows are there is a line on stderr.
        log: Called with each row, after it is written.
    """

    folder: Path | None
    resume_step: int = 0
    saved: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensorboard: bool = True
    log: Callable[[dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        self._file, self._board = None, None
        self._written = hashlib.sha256()
        if self.folder is None:
            return
        warn_if_changed(self.folder, self.saved)
        path = self.folder / "metrics.jsonl"
        text = _text(read_metrics(self.folder), self.resume_step)
        self._written.update(text.encode())
        write_text(path, text)
        self._file = path.open("a", encoding="utf-8")
        if self.tensorboard:
            # It imports Google's storage client: half a second, which jobs that read are spared.
            from tensorboardX import SummaryWriter

            board = str(self.folder / "tensorboard")
            self._board = SummaryWriter(board, purge_step=self.resume_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row; NaN and infinity are written as null, which JSON knows."""
        if self._file is None:
            return
        numbers = {name: float(value) for name, value in values.items()}
        row: dict[str, Any] = {"step": step}
        row |= {name: x if abs(x) < float("inf") else None for name, x in numbers.items()}
        if self._board is not None:
            known = {tag: of for tag, of in T5X_TAGS.items() if row.get(of[0]) is not None}
            tags = {tag: value(row[name]) for tag, (name, value) in known.items()}
            for name, number in {**numbers, **tags}.items():
                self._board.add_scalar(name, number, step)
        line = json.dumps(row) + "\n"
        self._written.update(line.encode())
        self._file.write(line)
        self._file.flush()
        if self.log is not None:
            self.log(row)

    def note(self) -> dict[str, str]:
        """For the checkpoint of this step: the SHA-256 of all rows."""
        return {"metrics": self._written.hexdigest()}

    def __exit__(self, *error: object) -> None:
        for opened in (self._file, self._board):
            if opened is not None:
                opened.close()


def warn_if_changed(folder: Path, saved: Mapping[str, Any]) -> None:
    """Prints a line on stderr where a checkpoint's note names other rows than there are."""
    if "metrics" not in saved:
        return
    text = _text(read_metrics(folder), saved["step"])
    if hashlib.sha256(text.encode()).hexdigest() != saved["metrics"]:
        said = f"its rows up to step {saved['step']} are not those that training wrote: lost or "
        path = Path(folder) / "metrics.jsonl"
        print(f"{path}: {said}changed; curves show what is there", file=sys.stderr)


def _text(rows: Iterable[Mapping[str, Any]], last_step: int) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= last_step)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder's metrics.jsonl; a last line cut off by a kill is left out."""
    path = Path(folder) / "metrics.jsonl"
    return read_jsonl(path, _ROW, cut_off=True) if path.exists() else []
