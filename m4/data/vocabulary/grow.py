"""Grows a vocabulary: all pieces keep their ids, and new ones come behind them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from m4.data.vocabulary.vocabulary import SPACE, Model, Vocabulary, tags_of, train
from m4.settings import InputError
from m4.storage.files import whole

_NORMAL, _USER_DEFINED = Model.SentencePiece.NORMAL, Model.SentencePiece.USER_DEFINED


def grow(
    path: Path, old: Vocabulary, texts: Iterable[str], size: int, languages: Sequence[str]
) -> dict[str, int | float]:
    """Writes the old vocabulary with new tags and pieces behind its own.

    Old pieces keep their ids and the order of their merges; new merges come after all of them.

    Args:
        texts: Text of which a vocabulary is trained; its characters are taken first, then its
            merges in the order in which they were learned.
        languages: Languages that get a tag, unless they have one.

    Returns:
        What `train` returns, where there is room for pieces, and "grown_from".

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
        # SentencePiece lists characters behind all merges; without them a new script is bytes.
        for piece in sorted(learned, key=lambda piece: len(piece) > 1)[:room]:
            _append(model, piece, _NORMAL)
    model.trainer_spec.vocab_size = len(model.pieces)
    with whole(path) as unfinished:
        unfinished.write_bytes(model.SerializeToString(deterministic=True))
    return {**about, "size": Vocabulary(path).size, "grown_from": old.size}


def _append(model: Any, piece: str, kind: int) -> None:
    # BPE's merges come in the order of scores: a new one after all that there are.
    lowest = min((one.score for one in model.pieces), default=0.0)
    model.pieces.add(piece=piece, type=kind, score=lowest - 1 if kind == _NORMAL else 0.0)
