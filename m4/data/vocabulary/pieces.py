"""Growing a vocabulary by new pieces, or trimming it to the pieces of a text.

In a grown vocabulary, all pieces keep their ids and new ones come behind them. In a trimmed one,
the text keeps its segmentation: a unigram model's best segmentation stays the best without unused
pieces, and with merges (BPE), every piece is kept with those that it is merged from.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.data.vocabulary.vocabulary import SPACE, Model, Vocabulary, tags_of, train, with_pieces
from m4.settings import InputError
from m4.storage.files import whole

_NORMAL, _UNUSED = Model.SentencePiece.NORMAL, Model.SentencePiece.UNUSED
_USER_DEFINED = Model.SentencePiece.USER_DEFINED
_BATCH = 10_000


def grow(
    path: Path, old: Vocabulary, texts: Iterable[str], size: int, languages: Sequence[str]
) -> dict[str, int | float]:
    """Writes the old vocabulary with new tags and pieces at the end.

    Old pieces keep their ids and the order of their merges; new merges come after all of them.

    Args:
        texts: Text on which a new vocabulary is trained; its characters are added first, then its
            merges in the order of learning.
        languages: Languages that get a tag unless they have one.

    Returns:
        The result of `train`, if there is room for pieces, and "grown_from".

    Raises:
        InputError: `size` is too small for the old pieces and the new tags.
    """
    model, known_tags = old.model(), {piece.removeprefix(SPACE) for piece in old.pieces}
    tags = [tag for tag in tags_of(languages) if tag.removeprefix(SPACE) not in known_tags]
    if size < old.size + len(tags):
        raise InputError(
            f"CorpusSpec.vocabulary_size = {size}: the vocabulary of {old.path} has {old.size} "
            f"pieces and needs {len(tags)} more tags: at least {old.size + len(tags)}"
        )
    for tag in tags:
        _append(model, tag, _USER_DEFINED)
    about: dict[str, int | float] = {"requested_size": size}
    if room := size - len(model.pieces):
        about = train(path, old.normalised(texts), size, languages)
        known = {piece.piece for piece in model.pieces}
        learned = (piece.piece for piece in Model.FromString(path.read_bytes()).pieces
                   if piece.type == _NORMAL and piece.piece not in known)  # fmt: skip
        # SentencePiece lists characters behind all merges; without them, a new script is bytes.
        for piece in sorted(learned, key=lambda piece: len(piece) > 1)[:room]:
            _append(model, piece, _NORMAL)
    model.trainer_spec.vocab_size = len(model.pieces)
    with whole(path) as unfinished:
        unfinished.write_bytes(model.SerializeToString(deterministic=True))
    return {**about, "size": Vocabulary(path).size, "grown_from": old.size}


def _append(model: Any, piece: str, kind: int) -> None:
    # BPE merges in the order of scores, so new merges come after all old ones.
    lowest = min((one.score for one in model.pieces), default=0.0)
    model.pieces.add(piece=piece, type=kind, score=lowest - 1 if kind == _NORMAL else 0.0)


def used_ids(
    vocabulary: Vocabulary, texts: Iterable[str], languages: Sequence[str] | None = None
) -> list[int]:
    """Returns the ids that texts use as sources or targets, and all special ids.

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
        plain.update(*vocabulary.encode(batch))
    if vocabulary.has_merges:
        ids = {piece.piece: i for i, piece in enumerate(pieces) if piece.type == _NORMAL}
        scores = {piece: pieces[i].score for piece, i in ids.items()}
        made = (part for i in plain - used for part in _parts(pieces[i].piece, scores))
        plain.update(ids[part] for part in made if part in ids)
    return sorted(used | plain)


def trimmed(vocabulary: Vocabulary, ids: Iterable[int]) -> bytes:
    """Returns a vocabulary file with only these ids, in the order of the original file."""
    model = with_pieces(vocabulary.path.read_bytes(), sorted(vocabulary.old_ids[i] for i in ids))
    return model.SerializeToString(deterministic=True)


def _parts(piece: str, scores: Mapping[str, float]) -> Iterator[str]:
    """Yields the characters of a piece and the intermediate pieces of its merges."""
    symbols = list(piece)
    yield from symbols
    while len(symbols) > 1:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        at = max(range(len(pairs)), key=lambda i: scores.get(pairs[i], float("-inf")))
        symbols[at : at + 2] = [pairs[at]]
        yield pairs[at]
