"""Normalising, tagging and trimming of text, alike for training, decoding and seqio."""

import unicodedata
from collections.abc import Sequence

from m4.data.directions import base_language


def normalised(text: str) -> str:
    """Returns a text in NFC, with one space for each run of any spaces."""
    return " ".join(unicodedata.normalize("NFC", text).split())


# Follows the tag of a source that a model wrote (Caswell et al. 2019, arXiv 1906.06442).
SYNTHETIC = "<bt>"
PAD_ID, EOS_ID = 0, 1
# Additional ids of a source (tag), and of a source or target (eos).
TAG_IDS, EOS_IDS = 1, 1


def tag_symbol(language: str) -> str:
    """Returns the text that asks for a translation into `language`: '<2gl>'."""
    return f"<2{base_language(language)}>"


def tag(text: str, target_language: str) -> str:
    """Puts the tag before a text: 'ola mundo', 'en' -> '<2en> ola mundo'."""
    return f"{tag_symbol(target_language)} {text}"


def target_of(tagged: str) -> str:
    """Returns the language of a tag: '<2en> ola mundo' -> 'en'."""
    return tagged.partition(" ")[0].removeprefix("<2").removesuffix(">")


def trim(ids: Sequence[int], length: int) -> list[int]:
    """Returns at most `length` ids that always end in eos (seqio's append_eos_after_trim)."""
    return [*ids[: length - 1], EOS_ID]
