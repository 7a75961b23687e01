"""Scores by a command of its own environment, such as COMET or MetricX (docs/evaluation.md).

The command reads lines {"source", "hypothesis", "reference"} of JSON, with "references" where there
are several, and prints one number a line, in order. It may answer line by line or at the end.
"""

import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from m4.eval.metrics import NAME, References, Statistics, each_of, reference_count
from m4.progress import ProgressBar
from m4.settings import InputError, SavedText, SettingError, checked


class _MoreLinesError(InputError):
    """A scorer printed more numbers than it was asked for."""


@checked
@dataclass(frozen=True)
class External:
    """A metric that a command computes; the score is the mean of its numbers, as they are.

    What was scored is kept: a text is scored once, and a scorer that ended goes on where it was.

    Attributes:
        command: its words. Of a saved config they are data, and not run.
        name: of the metric in scores and file names.
        version: of the scorer, for the signature.
        lower_is_better: whether its numbers count errors.
        folder: where scores are kept for other runs, too.
    """

    command: Sequence[str]
    name: str
    version: str | None = None
    lower_is_better: bool = False
    folder: str = "~/.cache/m4/scores"

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, self.name):
            raise SettingError("External.name", self.name, "letters, digits, _, - and .")

    def __call__(
        self,
        hypotheses: Sequence[str],
        references: References,
        language: str,
        sources: Sequence[str],
    ) -> Statistics:
        """Returns sums and counts. InputError: a saved config names the command, or it failed."""
        del language
        self._check()
        checksum = self._checksum()
        several = each_of(references)
        rows = []
        for source, hypothesis, given in zip(sources, hypotheses, several, strict=True):
            row = {"source": source, "hypothesis": hypothesis, "reference": given[0]}
            row |= {"references": list(given)} if len(given) > 1 else {}
            rows.append(json.dumps(row, ensure_ascii=False))
        scores = self._scores(rows, checksum)
        counts = np.array([[scores[row], 1] for row in rows], np.float64).reshape(len(rows), 2)
        count = reference_count(several)
        fields = [f"nrefs:{'var' if count < 0 else count}", f"scorer:{self.name}"]
        fields += [f"version:{self.version}"] if self.version else []
        signature = "|".join([*fields, f"sha256:{checksum}"])
        return Statistics(self.name, counts, _mean, signature, self.lower_is_better)

    def _check(self) -> None:
        if any(isinstance(word, SavedText) for word in (*self.command, self.folder)):
            raise InputError(
                f"this run's config scores with a command, {shlex.join(self.command)}: a run "
                "folder is data, and runs nothing; to allow it, give the command yourself: "
                f"--gin.external.External.command={shlex.quote(str([*map(str, self.command)]))}"
            )

    def _checksum(self) -> str:
        """Returns a digest of the command's words, of files among them their content."""
        made = [Path(self.command[0]).name]
        for word in self.command[1:]:
            path = Path(word)
            made.append(hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else word)
        return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]

    def _scores(self, rows: Sequence[str], checksum: str) -> dict[str, float]:
        """Returns the score of each row, after scoring and keeping those that are missing."""
        path = Path(self.folder).expanduser() / f"{self.name}-{self.version or ''}-{checksum}.jsonl"
        kept = _read(path)
        keys = {row: hashlib.sha256(row.encode()).hexdigest()[:32] for row in rows}
        missing = [row for row, key in keys.items() if key not in kept]
        if missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (
                path.open("ab", buffering=0) as file,
                ProgressBar(self.name, len(missing), "sentences") as bar,
            ):
                if begin := file.tell():  # closes a line that was cut
                    file.write(b"\n")
                done = 0
                try:
                    for score, row in zip(self._answers(missing), missing, strict=False):
                        kept[keys[row]] = score
                        file.write(json.dumps([keys[row], score]).encode() + b"\n")
                        done += 1
                        bar.update(done)
                except _MoreLinesError:  # a heading, say: which line is whose is not known
                    file.truncate(begin)
                    raise
                except InputError as error:
                    raise InputError(
                        f"{error}; {done:,} of {len(missing):,} sentences were scored and are kept "
                        f"in {path}: the same command goes on there"
                    ) from error
        return {row: kept[key] for row, key in keys.items()}

    def _answers(self, rows: Sequence[str]) -> Iterator[float]:
        """Yields the command's numbers, one for each row."""
        pipe = subprocess.PIPE
        with tempfile.TemporaryFile() as said:
            try:
                process = subprocess.Popen(
                    [*self.command], stdin=pipe, stdout=pipe, stderr=said, encoding="utf-8"
                )
            except OSError as error:
                raise InputError(f"{self.name}: {self.command[0]}: {error.strerror}") from error
            assert process.stdin is not None
            assert process.stdout is not None
            writer = threading.Thread(target=_write, args=(process.stdin, rows), daemon=True)
            writer.start()
            try:
                for number in range(1, len(rows) + 1):
                    line = process.stdout.readline()
                    if not line:
                        status = process.wait()
                        raise InputError(
                            f"{self.name}: the scorer ended with status {status} before line "
                            f"{number} ({_last_line(said)})"
                        )
                    yield _number(self.name, number, line)
                if more := process.stdout.readline():
                    said = f"{self.name}: more lines than sentences: {more.strip()[:60]}"
                    raise _MoreLinesError(f"{said}; none is kept")
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
                writer.join()


def _mean(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def _write(file: IO[str], rows: Sequence[str]) -> None:
    with suppress(BrokenPipeError), file:
        for row in rows:
            file.write(f"{row}\n")


def _number(name: str, line: int, text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(score := float(text)):
            return score
    raise InputError(
        f"{name}: line {line} of the scorer is {text.strip()[:60]!r}: must be a number, and "
        "nothing else on its standard output"
    )


def _last_line(file: IO[bytes]) -> str:
    """Returns the last words of a process on stderr."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 10_000))
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no message")


def _read(path: Path) -> dict[str, float]:
    """Returns the scores that are kept; a line that was cut is left out."""
    kept: dict[str, float] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError):
            key, score = json.loads(line)
            kept[key] = float(score)
    return kept
