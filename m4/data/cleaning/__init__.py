"""Stages of cleaning: each is a frozen dataclass of settings, a `CleaningStage`.

A stage never sees a whole corpus at once: it gets chunks of two languages and a split, and returns
which pairs to drop and why, or changed text. If it needs other chunks, it has one of the protocols
below, so that chunks may be on different machines.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

from m4.data.arrays import U64, Mask
from m4.data.cleaning.chunk import Chunk
from m4.settings import Between

Share = Annotated[float, Between(0, 1)]


@dataclass(frozen=True)
class Findings:
    """Findings of a check in a chunk of n pairs."""

    # Reason -> mask [n] of the pairs to drop. A pair that several reasons name is dropped for the
    # first.
    drop: Mapping[str, Mask] = field(default_factory=dict)
    # Reason -> mask [n] of the pairs with changed text.
    change: Mapping[str, Mask] = field(default_factory=dict)
    chunk: Chunk | None = None  # the pairs with changed text, if any
    # Reason -> mask [n] of the pairs that the stage cannot judge.
    not_checked: Mapping[str, Mask] = field(default_factory=dict)


Check = Callable[[Chunk], Findings]


@runtime_checkable
class FittedCheck(Protocol):
    """A check that looks at all pairs before it judges the first one."""

    def measure(self, chunk: Chunk) -> Counter[Any]:
        """Returns counts of a chunk as JSON, which are summed over chunks."""
        ...

    def fit(self, counts: Counter[Any]) -> Any:
        """Returns, as JSON, what the check derives from the counts of all pairs."""
        ...

    def judge(self, chunk: Chunk, fitted: Any) -> Findings:
        """Judges some pairs by the result of `fit`."""
        ...


@runtime_checkable
class FirstCheck(Protocol):
    """A check that judges a pair by whether an earlier one has the same keys."""

    def keys(self, chunk: Chunk) -> list[U64]:
        """Returns the keys [n] of the pairs, of one or more kinds."""
        ...

    def judge(self, chunk: Chunk, repeated: Sequence[Mask]) -> Findings:
        """Judges some pairs.

        Args:
            repeated: For each kind of key, a mask [n] of pairs whose key an earlier pair has.
        """
        ...


# A check that judges chunks independently, or one that needs more of the corpus.
AnyCheck = Check | FittedCheck | FirstCheck


@runtime_checkable
class HeldOut(Protocol):
    """A stage's `Opened` that remembers dev and test text when it judges train."""

    def arrays(self) -> dict[str, U64]:
        """Returns everything that it remembers."""
        ...

    def load(self, arrays: Mapping[str, U64]) -> None:
        """Replaces what it remembers by the arrays of another one."""
        ...


# (language pair, split) -> the check of that part of the corpus, or the reason why the stage cannot
# judge it, which is counted. A run opens a stage once and asks for test, then dev, then train.
Opened = Callable[[str, str], "AnyCheck | str"]


class CleaningStage:
    """Base class of the stages, which are frozen dataclasses.

    In dev and test, checks only flag pairs: nothing is dropped or changed.

    Attributes:
        name: Begins the stage's reasons in the ledger.
    """

    name: ClassVar[str]

    def identity(self) -> dict[str, Any]:
        """Returns, as JSON, everything that decides the results. Defaults to the settings."""
        return asdict(self)  # pyright: ignore[reportArgumentType]

    def open(self, language_pairs: Sequence[str]) -> Opened:
        """Starts the stage on a corpus of these language pairs. Defaults to `check` for each."""
        return lambda pair, split: self.check

    def check(self, chunk: Chunk) -> Findings:
        """Judges some pairs, in stages that treat all language pairs and splits alike."""
        raise NotImplementedError
