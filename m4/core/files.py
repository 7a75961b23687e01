"""Files written whole or not at all, and JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write to that becomes `path` at the end, or nothing if the writing fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: matplotlib and others go by it.
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A whole UTF-8 file."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """One JSON object a line, not escaped to ASCII: people read these files."""
    with whole(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[dict]:
    """Raises ValueError with file and line where a line is not a JSON object."""
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both
                raise ValueError(f"{path} line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number}: not a JSON object")
            rows.append(row)
    return rows
