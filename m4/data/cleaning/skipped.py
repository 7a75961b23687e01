"""The lines of a source's files that are no pair, and those that it put right, for the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from m4.data.cleaning.ledger import ANY, Ledger
from m4.data.sources import Source

_Counts = dict[tuple[str, str], int]


class SkippedLines:
    """Which language and split each file was read for.

    A source counts by file, and a file may be read again: for a language and split at a time the
    counts are emptied, looked at, and put back together at the end. Lines of a file that several
    languages or splits are read from belong to none of them alone; they are under `ANY`.
    """

    def __init__(self, source: Source) -> None:
        # (file, reason) -> lines; not every source has files.
        self._counted: dict[str, _Counts] = {
            name: getattr(source, name, {}) for name in ("skipped", "normalised")
        }
        self._all: dict[str, _Counts] = {name: {} for name in self._counted}
        self._read_for: dict[str, set[tuple[str, str]]] = {}

    @contextmanager
    def of(self, language: str, split: str) -> Iterator[None]:
        """Around the reading of one language and split."""
        for counted in self._counted.values():
            counted.clear()
        yield
        for name, counted in self._counted.items():
            self._all[name] |= counted
            for file, _ in counted:
                self._read_for.setdefault(file, set()).add((language, split))

    def into(self, ledger: Ledger) -> None:
        """Adds them: each line left out was read, and dropped."""
        for name, counted in self._counted.items():
            counted |= self._all[name]
            for (file, reason), lines in sorted(self._all[name].items()):
                languages, splits = (set(of) for of in zip(*self._read_for[file], strict=True))
                language = languages.pop() if len(languages) == 1 else ANY
                split = splits.pop() if len(splits) == 1 else ANY
                count = ledger.count(language, split)
                if name == "skipped":
                    count.read += lines
                    count.dropped[f"source: {reason}"] += lines
                else:
                    count.changed[f"source: {reason}"] += lines
