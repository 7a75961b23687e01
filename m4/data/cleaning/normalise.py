"""The stage normalise: canonical Unicode without meaningless characters."""

import re
from dataclasses import dataclass
from typing import ClassVar
from unicodedata import is_normalized, normalize

import numpy as np

from m4.data.cleaning import CleaningStage, Findings
from m4.data.cleaning.chunk import Chunk
from m4.data.directions import SIDES
from m4.settings import checked

_LINE_ENDS = re.compile("[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")
# Controls, halves of surrogate pairs, and noncharacters of Unicode.
_CONTROLS = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff\ufdd0-\ufdef\ufff9-\ufffb\ufffe\uffff"
    "\U0001fffe\U0001ffff\U0010fffe\U0010ffff]"
)
# The byte order mark, word joiner, soft hyphen, invisible operators.
_INVISIBLE = re.compile("[\ufeff\u00ad\u2060-\u2064]")
# A zero-width space separates words in scripts without spaces; elsewhere it is junk.
_ZERO_WIDTH_SPACE = re.compile("\u200b")
_DIVIDED_BY_IT = re.compile(
    "[\u0e00-\u0eff\u0f00-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1bbf\ua980-\ua9df]"
)
# Joiners shape Arabic, Indic letters and emoji. After a space or a letter of Latin, Greek,
# Cyrillic or Armenian there is nothing to shape; what stands after a virama at the end is kept.
_JOINERS = re.compile("(?<![^\\s\x21-\u058f\u200c\u200d])[\u200c\u200d]+")
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f]")
# Hebrew, Arabic and the other scripts that are written from right to left.
_RIGHT_TO_LEFT = re.compile(
    "[\u0590-\u05ff\u0600-\u061b\u061d-\u08ff\ufb1d-\ufdcf\ufdf0-\ufdff\ufe70-\ufefc"
    "\U00010800-\U00010fff\U0001e800-\U0001efff]"
)
_ANY = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufdd0-\ufdef\ufeff\ufff9-\ufffb\ufffe\uffff\U0001fffe\U0001ffff\U0010fffe\U0010ffff]"
)


@checked
@dataclass(frozen=True)
class Normalise(CleaningStage):
    """Normalises text to NFC without junk, and drops nothing.

    Line ends and tabs become a space. Control characters, halves of surrogate pairs, byte order
    marks, soft hyphens and joiners that join nothing are removed, and direction marks where nothing
    is written from right to left.
    """

    name: ClassVar[str] = "normalise"

    def fix(self, text: str) -> tuple[str, list[str]]:
        """Returns a sentence normalised, and the reasons for which it was changed."""
        reasons = []
        if _ANY.search(text):
            text, reasons = _without_junk(text)
        if not is_normalized("NFC", text):
            text = normalize("NFC", text)
            reasons.append("NFC")
        return text, reasons

    def check(self, chunk: Chunk) -> Findings:
        change: dict[str, np.ndarray] = {}
        sides = {side: chunk.side(side) for side in SIDES}
        for side, texts in sides.items():
            # Nearly always there is nothing to do, and a line break takes part in no composition.
            if not _ANY.search("".join(texts)) and is_normalized("NFC", "\n".join(texts)):
                continue
            sides[side], every = map(list, zip(*map(self.fix, texts), strict=True))
            for row, reasons in enumerate(every):
                for reason in reasons:
                    change.setdefault(reason, np.zeros(len(chunk), bool))[row] = True
        return Findings(change=change, chunk=Chunk(chunk.numbers, **sides) if change else None)


def _without_junk(text: str) -> tuple[str, list[str]]:
    reasons = []
    for reason, pattern, instead in (
        ("line ends and tabs", _LINE_ENDS, " "),
        ("control characters", _CONTROLS, ""),
        ("invisible characters", _INVISIBLE, ""),
        ("invisible characters", None if _DIVIDED_BY_IT.search(text) else _ZERO_WIDTH_SPACE, ""),
        ("direction marks", None if _RIGHT_TO_LEFT.search(text) else _DIRECTIONS, ""),
        ("invisible characters", _JOINERS, ""),  # judged by what precedes them in the result
    ):
        changed = text if pattern is None else pattern.sub(instead, text)
        if changed != text:
            text = changed
            if reason not in reasons:
                reasons.append(reason)
    if reasons:  # removed characters may leave two spaces, or one at an end
        text = " ".join(part for part in text.split(" ") if part)
    return text, reasons
