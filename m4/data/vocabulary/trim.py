"""Trims a unigram vocabulary to the pieces that a text uses.

The best segmentation of a text has its pieces only, so it stays the best one without the others.
"""

import itertools
from collections.abc import Iterable

from m4.data.vocabulary.vocabulary import Model, Vocabulary

_NORMAL, _UNUSED = Model.SentencePiece.NORMAL, Model.SentencePiece.UNUSED
_BATCH = 10_000


def used_ids(vocabulary: Vocabulary, texts: Iterable[str]) -> list[int]:
    """Returns the ids that texts use as sources or targets, and those of all special pieces."""
    pieces = vocabulary.model().pieces
    tags = {*vocabulary.tag_ids}
    used = {i for i, piece in enumerate(pieces) if piece.type not in (_NORMAL, _UNUSED)} | tags
    rest = iter(texts)
    while batch := list(itertools.islice(rest, _BATCH)):
        for encode in (vocabulary.encode, vocabulary.encode_targets):
            used.update(*encode(batch))
    return sorted(used)
