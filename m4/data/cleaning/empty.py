"""Empty sides: nothing that can be seen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from m4.data.cleaning import Check, Findings, Opened
from m4.data.cleaning.chunk import Chunk
from m4.data.directions import SIDES
from m4.settings import configurable

# Letters that show nothing.
_FILLERS = "\u115f\u1160\u3164\uffa0"
_VISIBLE = re.compile(
    "[^\\s\x00-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180b-\u180e\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0]"
)


@configurable
@dataclass(frozen=True)
class Empty:
    """Drops a pair with a side of white space and invisible characters only."""

    @property
    def name(self) -> str:
        return "empty"

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def open(self, languages: Sequence[str]) -> Opened:
        def check(language: str, split: str) -> Check:
            return _check

        return check


def is_empty(text: str) -> bool:
    """Whether a text shows nothing."""
    # Most sentences begin with a letter, and are quickly seen to be none.
    if text[:1].isalnum() and text[0] not in _FILLERS:
        return False
    return _VISIBLE.search(text) is None


def _check(chunk: Chunk) -> Findings:
    return Findings(
        {f"{side} side": np.array([is_empty(text) for text in chunk.side(side)]) for side in SIDES}
    )
