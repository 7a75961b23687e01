"""Stages of cleaning: one file a stage, each a frozen dataclass of settings, a `CleaningStage`.

A stage never sees a whole corpus at once: it gets chunks of one language and split, and says which
pairs to drop and why, or gives them back with other text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from m4.data.cleaning.chunk import Chunk
from m4.settings import Between

Mask = npt.NDArray[np.bool_]
Share = Annotated[float, Between(0, 1)]


@dataclass(frozen=True)
class Findings:
    """What a check found in a chunk of n pairs.

    drop: reason -> mask [n] of the pairs to drop. A pair that several reasons name is dropped for
    the first. change: reason -> mask [n] of the pairs whose text is another now; `chunk` has it.
    not_checked: why -> mask [n] of the pairs about which the stage cannot say anything.
    """

    drop: Mapping[str, Mask] = field(default_factory=dict)
    change: Mapping[str, Mask] = field(default_factory=dict)
    chunk: Chunk | None = None
    not_checked: Mapping[str, Mask] = field(default_factory=dict)


class NotChecked(NamedTuple):
    """A stage that cannot look at a language, and why: it is counted, never silent."""

    why: str


Check = Callable[[Chunk], Findings]


@runtime_checkable
class FittedCheck(Protocol):
    """A check that looks over all pairs that reach it before it judges the first one."""

    def fit(self, chunks: Iterator[Chunk]) -> None: ...

    def __call__(self, chunk: Chunk) -> Findings: ...


# (language, split) -> the check of that part of the corpus. A run opens a stage once and asks for
# all of test, then dev, then train.
Opened = Callable[[str, str], "Check | FittedCheck | NotChecked"]


class CleaningStage(Protocol):
    """The settings of a stage; `name` is that of its file and begins its reasons in the ledger.

    Dev and test go through the checks too. There they only flag: nothing is dropped or changed.
    """

    @property
    def name(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """All that decides what it does, as JSON."""
        ...

    def open(self, languages: Sequence[str]) -> Opened:
        """The stage at work on one corpus of these languages."""
        ...
