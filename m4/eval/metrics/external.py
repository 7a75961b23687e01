"""Scores by a command in its own environment, such as COMET or MetricX (docs/evaluation.md).

The command reads JSON lines {"source", "hypothesis", "reference"}, with "references" if there are
several, and prints one number per line, in order. It may answer line by line or at the end.
"""

import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from m4.eval.metrics import NAME, References, Statistics, each_of, reference_count
from m4.progress import ProgressBar
from m4.settings import InputError, SavedText, SettingError, checked

_LONGEST = 1000  # maximum characters read of a line


@checked
@dataclass(frozen=True)
class External:
    """A metric that a command computes; the score is the plain mean of its numbers.

    Scores are saved as soon as they are printed: a text is scored once, even after a kill.

    Attributes:
        command: Words of the command. Those of a saved config are never run.
        name: Name of the metric in scores and file names.
        version: Version of the scorer, for the signature.
        lower_is_better: Whether its numbers count errors.
        folder: Folder of saved scores, which runs may share.
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
        fields += [f"version:{self.version}"] * bool(self.version) + [f"sha256:{checksum}"]
        signature = "|".join(fields)
        return Statistics(self.name, counts, _mean, signature, self.lower_is_better)

    def _check(self) -> None:
        if any(isinstance(word, SavedText) for word in (*self.command, self.folder)):
            raise InputError(
                f"this run's config scores with a command, {shlex.join(self.command)}: a run "
                "folder is data, and runs nothing; to allow it, give the command yourself: "
                f"--gin.external.External.command={shlex.quote(str([*map(str, self.command)]))}"
            )

    def _checksum(self) -> str:
        """Returns a digest of the command's words, and of the content of files among them."""
        made = [Path(self.command[0]).name]
        for word in self.command[1:]:
            path = Path(word)
            made.append(hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else word)
        return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]

    def _scores(self, rows: Sequence[str], checksum: str) -> dict[str, float]:
        """Returns the score of each row, after scoring and saving missing ones."""
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
                if begin := file.tell():  # ends a line that was cut
                    file.write(b"\n")
                done = 0
                try:
                    for score, row in zip(self._answers(missing), missing, strict=False):
                        kept[keys[row]] = score
                        file.write(json.dumps([keys[row], score]).encode() + b"\n")
                        done += 1
                        bar.update(done)
                except InputError as error:
                    if done == len(missing):  # an extra line: the assignment of lines is unknown
                        file.truncate(begin)
                        raise
                    raise InputError(
                        f"{error}; {done:,} of {len(missing):,} sentences were scored and are kept "
                        f"in {path}: the same command goes on there"
                    ) from error
        return {row: kept[key] for row, key in keys.items()}

    def _answers(self, rows: Sequence[str]) -> Iterator[float]:
        """Yields the command's numbers as it prints them, one per row."""
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as given,
            tempfile.TemporaryFile() as said,
        ):
            given.writelines(f"{row}\n" for row in rows)
            given.seek(0)
            try:
                process = subprocess.Popen(
                    [*self.command], stdin=given, stdout=subprocess.PIPE, stderr=said,
                    encoding="utf-8", errors="replace",
                )  # fmt: skip
            except OSError as error:
                raise InputError(f"{self.name}: {self.command[0]}: {error.strerror}") from error
            with process:
                assert process.stdout is not None
                try:
                    for number in range(1, len(rows) + 1):
                        if not (line := process.stdout.readline(_LONGEST)):
                            raise InputError(
                                f"{self.name}: the scorer ended with status {process.wait()} "
                                f"before line {number} ({_last_line(said)})"
                            )
                        yield _number(self.name, number, line)
                    if more := process.stdout.readline(_LONGEST):
                        said_more = f"more lines than sentences: {more.strip()[:60]}"
                        raise InputError(f"{self.name}: {said_more}; none is kept")
                except BaseException:  # a scorer that never stops, or Ctrl-C
                    process.kill()
                    raise


def _mean(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def _number(name: str, number: int, line: str) -> float:
    with suppress(ValueError):
        if math.isfinite(score := float(line)):
            return score
    raise InputError(
        f"{name}: line {number} of the scorer is {line.strip()[:60]!r}: must be a number, and "
        "nothing else on its standard output"
    )


def _last_line(file: IO[bytes]) -> str:
    """Returns the last line of a process's stderr."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 10_000))
    lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no message")


def _read(path: Path) -> dict[str, float]:
    """Returns the saved scores; a line that was cut is left out."""
    kept: dict[str, float] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError):
            key, score = json.loads(line)
            kept[key] = float(score)
    return kept
