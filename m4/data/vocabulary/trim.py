"""Trims a vocabulary to the pieces that a text uses.

The text keeps its segmentation. With a unigram model the best segmentation has its pieces only, so
it stays the best one without the others. With merges (BPE) every piece comes with those that it is
merged from: merges of a text's pieces stay within them, so each is made as it would be alone.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from m4.data.vocabulary.vocabulary import Model, Vocabulary, with_pieces

_NORMAL, _UNUSED = Model.SentencePiece.NORMAL, Model.SentencePiece.UNUSED
_BATCH = 10_000


def used_ids(
    vocabulary: Vocabulary, texts: Iterable[str], languages: Sequence[str] | None = None
) -> list[int]:
    """Returns the ids that texts use as sources or targets, and those of all special pieces.

    languages: Languages that keep their tag. Defaults to all.
    """
    pieces = vocabulary.model().pieces
    used = {i for i, piece in enumerate(pieces) if piece.type not in (_NORMAL, _UNUSED)}
    used.update(vocabulary.tag_ids)
    if languages is not None:
        others = (one for one in vocabulary.languages if one not in languages)
        used.difference_update(map(vocabulary.tag_id, others))
    rest, plain = iter(texts), set[int]()
    while batch := list(itertools.islice(rest, _BATCH)):
        for encode in (vocabulary.encode, vocabulary.encode_targets):
            plain.update(*encode(batch))
    if vocabulary.has_merges:
        ids = {piece.piece: i for i, piece in enumerate(pieces) if piece.type == _NORMAL}
        scores = {piece: pieces[i].score for piece, i in ids.items()}
        made = (part for i in plain - used for part in _parts(pieces[i].piece, scores))
        plain.update(ids[part] for part in made if part in ids)
    return sorted(used | plain)


def trimmed(vocabulary: Vocabulary, ids: Iterable[int]) -> bytes:
    """Returns the file of a vocabulary that has only these ids, in the order of its own file."""
    model = with_pieces(vocabulary.path.read_bytes(), sorted(vocabulary.old_ids[i] for i in ids))
    return model.SerializeToString(deterministic=True)


def _parts(piece: str, scores: Mapping[str, float]) -> Iterator[str]:
    """Yields the characters of a piece, and what SentencePiece merges them to on the way to it."""
    symbols = list(piece)
    yield from symbols
    while len(symbols) > 1:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        at = max(range(len(pairs)), key=lambda i: scores.get(pairs[i], float("-inf")))
        symbols[at : at + 2] = [pairs[at]]
        yield pairs[at]
