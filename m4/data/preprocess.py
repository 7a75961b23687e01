"""Tags, tokenizes and trims text, in batches, alike for training, decoding and seqio."""

from collections.abc import Sequence
from typing import Protocol

from m4.data.directions import base_language
from m4.settings import InputError

# Behind the tag of a source that a model wrote (Caswell et al. 2019, arXiv 1906.06442).
SYNTHETIC = "<bt>"
PAD_ID, EOS_ID = 0, 1
# Ids that a source has in addition to its text, and a source or a target.
TAG_IDS, EOS_IDS = 1, 1


class Encoder(Protocol):
    """The part of a vocabulary that is needed here."""

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]: ...
    def encode_tagged(self, texts: Sequence[str]) -> list[list[int]]: ...


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
    """Returns at most `length` ids, the last one always eos (seqio's append_eos_after_trim)."""
    return [*ids[: length - 1], EOS_ID]


def source_ids(
    vocabulary: Encoder, texts: Sequence[str], target_language: str, length: int
) -> list[list[int]]:
    """Returns tagged, tokenized, trimmed ids with eos, each at most `length` long."""
    tagged = [tag(text, target_language) for text in texts]
    return [trim(ids, length) for ids in vocabulary.encode_tagged(tagged)]


def target_ids(vocabulary: Encoder, texts: Sequence[str], length: int) -> list[list[int]]:
    """Returns tokenized, trimmed ids with eos, each at most `length` long."""
    return [trim(ids, length) for ids in vocabulary.encode_targets(list(texts))]


def split_direction(direction: str) -> tuple[str, str]:
    """Splits a direction, of which one side is English: 'en-gl' -> ('en', 'gl')."""
    parts = direction.split("-")
    if len(parts) != 2 or parts.count("en") != 1 or not all(parts):
        raise InputError(
            f"direction {direction!r}: must be 'en-xx' or 'xx-en', with '-' between the codes"
        )
    return parts[0], parts[1]


def language_of(direction: str) -> str:
    """Returns the side of a direction that is not English: "gl" of "en-gl" and of "gl-en"."""
    source, target = split_direction(direction)
    return target if source == "en" else source


def sides_of(direction: str) -> tuple[str, str]:
    """Returns the sides that are source and target: ("english", "translation") of 'en-gl'."""
    from_english = split_direction(direction)[0] == "en"
    return ("english", "translation") if from_english else ("translation", "english")
