"""The ledger of a corpus: pairs read, kept and dropped, with reasons, by languages and split.

read = kept + dropped, for every pair of languages and split: `Ledger.check`, and a test on every
path to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from m4.storage import records

# The whole ledger with examples, in a cache's folder.
LEDGER_FILE = "ledger.json"
# Stands for the languages or split of lines in a file that several of them are read from.
ANY = "*"
_COUNTERS = ("dropped", "changed", "flagged", "not_checked")
_EXAMPLE_CHARACTERS = 300


class Example(NamedTuple):
    """A pair with a reason; `number` is its place in the order of the source, from 1."""

    number: int
    first: str
    second: str


_COUNT = records.record(
    {
        "read": records.count,
        "kept": records.count,
        **{f"{name}?": records.named(records.count) for name in _COUNTERS},
        "examples?": records.named(
            records.listed(records.entry(records.count, records.text, records.text))
        ),
    }
)
_COUNTS = records.named(records.named(_COUNT))
# Of `Ledger.as_json`.
LEDGER = records.record({"stages": records.named(records.anything), "pairs": _COUNTS})


@dataclass
class Count:
    """Counts of one pair of languages and split."""

    read: int = 0
    kept: int = 0
    # Reason -> pairs. Each dropped pair has one reason.
    dropped: Counter[str] = field(default_factory=Counter)
    # Reason -> pairs. A pair may have several reasons, here and below.
    changed: Counter[str] = field(default_factory=Counter)
    # Reason -> pairs of dev and test, which are never dropped.
    flagged: Counter[str] = field(default_factory=Counter)
    # Reason -> pairs that a stage could not judge.
    not_checked: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Example]] = field(default_factory=dict)  # reason -> its first pairs

    def drop(self, reason: str, pairs: int) -> None:
        """Drops `pairs` of those that were kept so far."""
        if pairs:
            self.kept -= pairs
            self.dropped[reason] += pairs

    def leave_out(self, reason: str, pairs: int, split: str) -> None:
        """Drops training pairs; pairs of dev and test are flagged."""
        if split == "train":
            self.drop(reason, pairs)
        elif pairs:
            self.flagged[reason] += pairs

    def show(self, reason: str, examples: Iterable[Example], most: int) -> None:
        """Keeps the first `most` examples of a reason, shortened."""
        shown = self.examples.setdefault(reason, [])
        for example in examples:
            if len(shown) >= most:
                return
            sides = (_shortened(side) for side in (example.first, example.second))
            shown.append(Example(example.number, *sides))

    def add(self, later: Count, most: int) -> None:
        """Adds the counts of pairs that come after these; `most` examples of a reason stay."""
        for reason, examples in later.examples.items():
            moved = (one._replace(number=one.number + self.read) for one in examples)
            self.show(reason, moved, most)
        self.read += later.read
        self.kept += later.kept
        for name in _COUNTERS:
            getattr(self, name).update(getattr(later, name))

    def as_json(self, examples: bool = True) -> dict[str, Any]:
        """Returns JSON, with reasons in the order of their names, without empty ones."""
        made: dict[str, Any] = {"read": self.read, "kept": self.kept}
        for name in _COUNTERS:
            if counted := {r: n for r, n in sorted(getattr(self, name).items()) if n}:
                made[name] = counted
        if examples and (shown := {r: e for r, e in sorted(self.examples.items()) if e}):
            made["examples"] = {reason: list(map(list, some)) for reason, some in shown.items()}
        return made

    @classmethod
    def from_json(cls, made: Mapping[str, Any]) -> Count:
        count = cls(made["read"], made["kept"])
        for name in _COUNTERS:
            getattr(count, name).update(made.get(name, {}))
        for reason, some in made.get("examples", {}).items():
            count.examples[reason] = [Example(*one) for one in some]
        return count


class Ledger:
    """Counts by pair of languages and split.

    Attributes:
        stages: The stages that ran, {name: {settings}}, in their order.
    """

    def __init__(self, stages: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.stages = dict(stages or {})
        self.counts: dict[str, dict[str, Count]] = {}

    def count(self, pair: str, split: str) -> Count:
        """Returns the counts of one pair and split; new ones where there are none."""
        return self.counts.setdefault(pair, {}).setdefault(split, Count())

    def check(self) -> None:
        """Asserts that read = kept + dropped everywhere."""
        for pair, splits in self.counts.items():
            for split, count in splits.items():
                dropped = sum(count.dropped.values())
                assert count.read == count.kept + dropped, (pair, split, count)
                assert count.kept >= 0, (pair, split, count)

    def reasons(self, what: str) -> list[str]:
        """Returns the reasons of a counter, such as "dropped", the most frequent ones first."""
        return [reason for reason, pairs in getattr(self.total(), what).most_common() if pairs]

    def total(self, split: str | None = None) -> Count:
        """Returns the sum over pairs of one split or of all, without examples."""
        sums = Count()
        for splits in self.counts.values():
            for name, count in splits.items():
                if split in (None, name):
                    sums.add(count, 0)
        return sums

    def summary(self) -> list[str]:
        """Returns a line for the log on what was left out of the training text, if anything was."""
        count = self.total("train")
        count.add(self.total(ANY), 0)
        if not (dropped := sum(count.dropped.values())):
            return []
        reasons = "; ".join(f"{reason}: {pairs:,}" for reason, pairs in count.dropped.most_common())
        return [f"{dropped:,} of {count.read:,} training pairs left out: {reasons}"]

    def as_json(self, examples: bool = True) -> dict[str, Any]:
        """Returns everything as JSON."""
        return {
            "stages": self.stages,
            "pairs": {
                pair: {split: count.as_json(examples) for split, count in splits.items()}
                for pair, splits in self.counts.items()
            },
        }

    @classmethod
    def from_json(cls, made: Mapping[str, Any]) -> Ledger:
        ledger = cls(made["stages"])
        ledger.counts = {
            pair: {split: Count.from_json(count) for split, count in splits.items()}
            for pair, splits in made["pairs"].items()
        }
        return ledger


def _shortened(text: str) -> str:
    return text if len(text) <= _EXAMPLE_CHARACTERS else text[: _EXAMPLE_CHARACTERS - 1] + "…"
