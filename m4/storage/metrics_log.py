"""Metrics of training: `metrics.jsonl`, one row a log step, and TensorBoard.

TensorBoard's files are written by tensorboardX: tf.summary would cost every training process
TensorFlow's 400 MB.
"""

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


class Metrics:
    """A log of rows {"step": ..., name: number}, in `metrics.jsonl` and `tensorboard/`.

    TensorBoard has them under `T5X_TAGS`, too. Opened again at `resume_step`, rows of later steps
    (of work that was lost) are removed first, so that a resumed run leaves the file that an
    uninterrupted one would have left. Without a folder nothing is written: another process does it.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        resume_step: int = 0,
        saved: Mapping[str, Any] | None = None,
        tensorboard: bool = True,
        log: Callable[[dict[str, Any]], None] | None = None,
    ):
        """Opens the log.

        Args:
            saved: The note of the checkpoint of `resume_step`; rows that are not those that it
                names are a line on stderr.
            log: Called with each row, after it is written.
        """
        self._file, self._board, self._log = None, None, log
        self._written = hashlib.sha256()
        if folder is None:
            return
        warn_if_changed(folder, saved or {})
        self._path = Path(folder) / "metrics.jsonl"
        text = _text(read_metrics(folder), resume_step)
        self._written.update(text.encode())
        write_text(self._path, text)
        self._file = self._path.open("a", encoding="utf-8")
        if tensorboard:
            # It imports Google's storage client: half a second, which jobs that read are spared.
            from tensorboardX import SummaryWriter

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
        if self._board is not None:
            for tag, (name, of) in T5X_TAGS.items():
                if row.get(name) is not None:
                    self._board.add_scalar(tag, of(row[name]), step)
        line = json.dumps(row) + "\n"
        self._written.update(line.encode())
        self._file.write(line)
        self._file.flush()
        if self._log is not None:
            self._log(row)

    def note(self) -> dict[str, str]:
        """For the checkpoint of this step: the SHA-256 of all rows."""
        return {"metrics": self._written.hexdigest()}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def warn_if_changed(folder: Path, saved: Mapping[str, Any]) -> None:
    """Prints a line on stderr where a checkpoint's note names other rows than there are."""
    if "metrics" not in saved:
        return
    text = _text(read_metrics(folder), saved["step"])
    if hashlib.sha256(text.encode()).hexdigest() != saved["metrics"]:
        print(
            f"{Path(folder) / 'metrics.jsonl'}: its rows up to step {saved['step']} are not those "
            "that training wrote: lost or changed; curves show what is there",
            file=sys.stderr,
        )


def _text(rows: Iterable[Mapping[str, Any]], last_step: int) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= last_step)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder's metrics.jsonl; a last line cut off by a kill is left out."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    return read_jsonl(path, _ROW, cut_off=True)
