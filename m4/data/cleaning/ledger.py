"""The ledger of a corpus: pairs read, kept and dropped, with reasons, by languages and split.

read = kept + dropped, for every language pair and split (`Ledger.check`, and tests of all paths).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Stands for the languages or split of lines in a file with several of them.
ANY = "*"
_COUNTERS = ("dropped", "changed", "flagged", "not_checked")


@dataclass
class Count:
    """Counts of one pair of languages and split."""

    read: int = 0
    kept: int = 0
    # Reason -> dropped pairs, each with one reason.
    dropped: Counter[str] = field(default_factory=Counter)
    # Reason -> changed pairs. A pair may have several reasons, here and below.
    changed: Counter[str] = field(default_factory=Counter)
    # Reason -> pairs of dev and test, which are never dropped.
    flagged: Counter[str] = field(default_factory=Counter)
    # Reason -> pairs that a stage could not judge.
    not_checked: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, pairs: int) -> None:
        """Moves `pairs` pairs from kept to dropped."""
        if pairs:
            self.kept -= pairs
            self.dropped[reason] += pairs

    def leave_out(self, reason: str, pairs: int, split: str) -> None:
        """Counts training pairs as dropped, and dev and test pairs as flagged."""
        if split == "train":
            self.drop(reason, pairs)
        elif pairs:
            self.flagged[reason] += pairs

    def add(self, other: Count) -> None:
        """Adds other counts."""
        self.read += other.read
        self.kept += other.kept
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))

    def as_json(self) -> dict[str, Any]:
        """Returns JSON without empty counts, with reasons sorted by name."""
        made: dict[str, Any] = {"read": self.read, "kept": self.kept}
        for name in _COUNTERS:
            if counted := {r: n for r, n in sorted(getattr(self, name).items()) if n}:
                made[name] = counted
        return made

    @classmethod
    def from_json(cls, made: Mapping[str, Any]) -> Count:
        count = cls(made["read"], made["kept"])
        for name in _COUNTERS:
            getattr(count, name).update(made.get(name, {}))
        return count


class Ledger:
    """Counts by pair of languages and split.

    Attributes:
        stages: Stages that ran, {name: {settings}}, in order.
    """

    def __init__(self, stages: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.stages = dict(stages or {})
        self.counts: dict[str, dict[str, Count]] = {}

    def count(self, pair: str, split: str) -> Count:
        """Returns the counts of one pair and split, which may be new."""
        return self.counts.setdefault(pair, {}).setdefault(split, Count())

    def check(self) -> None:
        """Asserts that read = kept + dropped everywhere."""
        for pair, splits in self.counts.items():
            for split, count in splits.items():
                dropped = sum(count.dropped.values())
                assert count.read == count.kept + dropped, (pair, split, count)
                assert count.kept >= 0, (pair, split, count)

    def reasons(self, what: str) -> list[str]:
        """Returns the reasons in a counter such as "dropped", the most frequent first."""
        return [reason for reason, pairs in getattr(self.total(), what).most_common() if pairs]

    def total(self, split: str | None = None) -> Count:
        """Returns the sum over language pairs for one split or all."""
        sums = Count()
        for splits in self.counts.values():
            for name, count in splits.items():
                if split in (None, name):
                    sums.add(count)
        return sums

    def summary(self) -> list[str]:
        """Returns a line for the log on dropped training text, if any."""
        count = self.total("train")
        count.add(self.total(ANY))
        if not (dropped := sum(count.dropped.values())):
            return []
        reasons = "; ".join(f"{reason}: {pairs:,}" for reason, pairs in count.dropped.most_common())
        return [f"{dropped:,} of {count.read:,} training pairs left out: {reasons}"]

    def as_json(self) -> dict[str, Any]:
        """Returns everything as JSON."""
        pairs = {p: {s: c.as_json() for s, c in of.items()} for p, of in self.counts.items()}
        return {"stages": self.stages, "pairs": pairs}

    @classmethod
    def from_json(cls, made: Mapping[str, Any]) -> Ledger:
        ledger = cls(made["stages"])
        given = made["pairs"].items()
        ledger.counts = {p: {s: Count.from_json(c) for s, c in of.items()} for p, of in given}
        return ledger
