"""Stages of cleaning: each is a frozen dataclass of settings, a `CleaningStage`.

A stage never sees a whole corpus at once: it gets chunks of two languages and a split, and says
which pairs to drop and why, or gives them back with other text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from m4.data.cleaning.chunk import Chunk
from m4.settings import Between

Mask = npt.NDArray[np.bool_]
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


class NotChecked(NamedTuple):
    """Says that a stage cannot judge two languages, and why: this is counted, never silent."""

    why: str


Check = Callable[[Chunk], Findings]


@runtime_checkable
class FittedCheck(Protocol):
    """A check that looks over all pairs that reach it before it judges the first one."""

    def fit(self, chunks: Iterator[Chunk]) -> None:
        """Looks over all pairs."""
        ...

    def __call__(self, chunk: Chunk) -> Findings:
        """Judges some pairs."""
        ...


# (pair of languages, split) -> the check of that part of the corpus. A run opens a stage once and
# asks for all of test, then dev, then train.
Opened = Callable[[str, str], "Check | FittedCheck | NotChecked"]


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
