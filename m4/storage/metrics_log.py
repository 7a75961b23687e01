"""Metrics of training: `metrics.jsonl`, with one row per log step, and TensorBoard.

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

# T5X's tag -> m4's name with the same meaning, and the conversion of m4's value.
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

    TensorBoard also has values under `T5X_TAGS`. A resumed run leaves the same file as an
    uninterrupted one. Without a folder, nothing is written, as another process does it.

    Attributes:
        resume_step: Step after which rows are removed, as their work was lost.
        saved: Note of that checkpoint; if the rows differ from it, stderr says so.
        log: Function called with each row after writing it.
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
            # Imported late, as it imports Google's storage client, which takes half a second.
            from tensorboardX import SummaryWriter

            board = str(self.folder / "tensorboard")
            self._board = SummaryWriter(board, purge_step=self.resume_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row, with NaN and infinity as null, for JSON."""
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
        """Returns the note for this step's checkpoint: the SHA-256 of all rows."""
        return {"metrics": self._written.hexdigest()}

    def __exit__(self, *error: object) -> None:
        for opened in (self._file, self._board):
            if opened is not None:
                opened.close()


def warn_if_changed(folder: Path, saved: Mapping[str, Any]) -> None:
    """Prints a line on stderr if the rows differ from those in a checkpoint's note."""
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
    """Returns the rows of a folder's metrics.jsonl, without a last line cut off by a kill."""
    path = Path(folder) / "metrics.jsonl"
    return read_jsonl(path, _ROW, cut_off=True) if path.exists() else []
