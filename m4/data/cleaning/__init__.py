"""Stages of cleaning: each is a frozen dataclass of settings, a `CleaningStage`.

A stage never sees a whole corpus at once: it gets chunks of two languages and a split, and says
which pairs to drop and why, or gives them back with other text. What it needs to know of other
chunks is one of the protocols below, so that chunks may be on different machines.
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
    # Reason -> mask [n] of the pairs whose text was changed.
    change: Mapping[str, Mask] = field(default_factory=dict)
    chunk: Chunk | None = None  # the pairs with their changed text, where there is any
    # Why -> mask [n] of the pairs that the stage cannot judge.
    not_checked: Mapping[str, Mask] = field(default_factory=dict)


Check = Callable[[Chunk], Findings]


@runtime_checkable
class FittedCheck(Protocol):
    """A check that looks over all pairs that reach it before it judges the first one."""

    def measure(self, chunk: Chunk) -> Counter[Any]:
        """Returns counts of a chunk by number or text, as JSON has; those of all are added."""
        ...

    def fit(self, counts: Counter[Any]) -> Any:
        """Returns what the counts of all pairs say, as JSON."""
        ...

    def judge(self, chunk: Chunk, fitted: Any) -> Findings:
        """Judges some pairs by what `fit` said."""
        ...


@runtime_checkable
class FirstCheck(Protocol):
    """A check that judges a pair by whether an earlier one has the same keys."""

    def keys(self, chunk: Chunk) -> list[U64]:
        """Returns keys [n] of the pairs, of one kind or several."""
        ...

    def judge(self, chunk: Chunk, repeated: Sequence[Mask]) -> Findings:
        """Judges some pairs.

        Args:
            repeated: For each kind of key a mask [n] of the pairs whose key an earlier pair has.
        """
        ...


# A check that judges a chunk alone, or one that needs more of the corpus.
AnyCheck = Check | FittedCheck | FirstCheck


@runtime_checkable
class HeldOut(Protocol):
    """A stage's `Opened` that remembers what it saw of dev and test while it judges train."""

    def arrays(self) -> dict[str, U64]:
        """Returns all that it remembers."""
        ...

    def load(self, arrays: Mapping[str, U64]) -> None:
        """Remembers what another one gave, and nothing else."""
        ...


# (pair of languages, split) -> the check of that part of the corpus, or why the stage cannot judge
# it: this is counted, never silent. A run opens a stage once and asks for all of test, then dev,
# then train.
Opened = Callable[[str, str], "AnyCheck | str"]


class CleaningStage:
    """Base class of the stages, which are frozen dataclasses.

    Dev and test go through the checks too. There they only flag: nothing is dropped or changed.

    Attributes:
        name: Begins the stage's reasons in the ledger.
    """

    name: ClassVar[str]

    def identity(self) -> dict[str, Any]:
        """Returns all that decides what the stage does, as JSON. Defaults to the settings."""
        return asdict(self)  # pyright: ignore[reportArgumentType]

    def open(self, language_pairs: Sequence[str]) -> Opened:
        """Starts the stage on a corpus of these pairs. Defaults to `check` for each of them."""
        return lambda pair, split: self.check

    def check(self, chunk: Chunk) -> Findings:
        """Judges some pairs, for stages that treat all pairs of languages and splits alike."""
        raise NotImplementedError
