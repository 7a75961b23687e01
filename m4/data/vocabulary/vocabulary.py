"""SentencePiece vocabularies: trained on sampled text, used on batches.

Ids are those of T5 (others are converted, `Vocabulary.old_ids`): pad 0, eos 1, unk 2, no bos; then
the target-language tags, the 256 byte pieces, the merges and the characters; and pieces added by
growth. A tag's piece is '▁<2gl>', with the space that SentencePiece puts before every word, so that
a tag costs only one id.

m4's models do not normalise: text is normalised before (`m4.data.preprocess`; the name of the rules
is in the model), and decoded in that form. T5's models, and others that m4 did not train, normalise
by their own rules.
"""

import hashlib
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

import sentencepiece
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from m4.data.directions import is_synthetic
from m4.data.preprocess import SYNTHETIC, normalised, tag_symbol
from m4.settings import InputError, SettingError
from m4.storage.files import whole

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
_BYTES = 256
SPACE = "▁"
# SentencePiece takes U+2581 for a space, so a noncharacter, spelled in bytes, replaces it in texts.
_SPACE_SIGN = "\ufdd0"
# Characters that never become pieces: the above, and one reserved by SentencePiece's training.
_NO_PIECES = f"{_SPACE_SIGN}\u2585"
# Bytes above which SentencePiece's training skips a line, and characters at which lines are cut, so
# that none is skipped (its positions within a word have 16 bits).
_MOST_LINE_BYTES, _MOST_LINE_CHARACTERS = 1 << 16, 1 << 14
# protobuf makes its classes while it is imported.
Model: Any = vars(sentencepiece_model_pb2)["ModelProto"]
_BPE = 2  # TrainerSpec.ModelType
_NFC = "nfc"  # name of the rules for m4's models, whose texts are normalised before
_TAG = re.compile(SPACE + r"?<(2\w+|bt)>")
# Least number of pieces for merges and characters; with fewer, everything would be spelled out.
_LEAST_PIECES = 16
# Share of a text's characters that get a piece, within half of the free pieces, as a script with
# thousands of characters would leave no room for merges. Others are spelled in bytes.
_COVERAGE = 0.9995


class Vocabulary:
    """A trained SentencePiece model.

    encode and decode work on whole batches. The file is read at first use.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(f"{self.path}: no such vocabulary file")

    @cached_property
    def _file(self) -> bytes:
        return self.path.read_bytes()

    @cached_property
    def old_ids(self) -> list[int]:
        """The id in the file of each piece: 0, 1, 2, ..., unless the file's ids differ from T5's.

        In a vocabulary without pad, such as MADLAD-400's, <s> is the pad.
        """
        of = SentencePieceProcessor()
        try:
            of.load_from_serialized_proto(self._file)
            of.id_to_piece([*range(of.get_piece_size())])  # are all UTF-8
        except (RuntimeError, UnicodeDecodeError) as error:
            raise InputError(f"{self.path}: not a SentencePiece model") from error
        pad = of.bos_id() if of.pad_id() < 0 else of.pad_id()
        first = pad, of.eos_id(), of.unk_id()
        if min(first) < 0 or len({*first}) < len(first):
            said = f"pad, eos and unk have the ids {first}: must have each one"
            raise InputError(f"{self.path}: {said}")
        return [*first, *sorted({*range(of.get_piece_size())} - {*first})]

    @property
    def _has_own_ids(self) -> bool:
        return self.old_ids[: UNK_ID + 1] != [PAD_ID, EOS_ID, UNK_ID]

    @cached_property
    def _proto(self) -> bytes:
        return _in_order(self._file, self.old_ids) if self._has_own_ids else self._file

    @cached_property
    def _processor(self) -> SentencePieceProcessor:
        return SentencePieceProcessor(model_proto=self._proto)

    @property
    def special_pieces(self) -> list[str]:
        """Pad, eos and unk in the file."""
        pieces = Model.FromString(self._file).pieces
        return [pieces[i].piece for i in self.old_ids[: UNK_ID + 1]]

    def model(self) -> Any:
        """Returns SentencePiece's model with T5's ids, for changing and writing."""
        return Model.FromString(self._proto)

    @cached_property
    def _text_processor(self) -> SentencePieceProcessor:
        return SentencePieceProcessor(model_proto=without_tags(self._proto))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        return hashlib.sha256(self._file).hexdigest()

    @cached_property
    def normalises(self) -> bool:
        """True if texts are normalised before; models not trained by m4 have their own rules."""
        spec = Model.FromString(self._proto).normalizer_spec
        return spec.name == _NFC and not spec.precompiled_charsmap

    @property
    def size(self) -> int:
        """Number of pieces: ids are 0 ... size - 1."""
        return self._processor.get_piece_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of texts, without eos; the word "<2gl>" in a text is no tag."""
        _ = self._processor  # which reports an invalid model
        if self.normalises:
            texts = [escaped(normalised(text)) for text in texts]
        return self._text_processor.encode(list(texts), num_threads=1)

    encode_targets = encode  # for one vocabulary of sources and targets

    def normalised(self, texts: Iterable[str]) -> Iterator[str]:
        """Yields texts in the form to which their ids decode."""
        if self.normalises:
            yield from map(normalised, texts)
        else:
            for text in texts:
                yield cast(str, self._processor.normalize(text)).replace(SPACE, " ").strip()

    def encode_tagged(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of tagged texts ("<2gl> three birds"): the tag's, then `encode`'s.

        Vocabularies without tags (`m4.data.sources.IdSource`) ignore them.
        """
        parts = [text.partition(" ") for text in texts]
        if not self.languages:
            return self.encode([text for _, _, text in parts])
        tags = [self._tags.get(first, UNK_ID) for first, _, _ in parts]
        known = [i != UNK_ID for i in tags]
        plain = self.encode(
            [part[2] if at else text for at, part, text in zip(known, parts, texts, strict=True)]
        )
        return [[tag, *ids] if at else ids for at, tag, ids in zip(known, tags, plain, strict=True)]

    @cached_property
    def pieces(self) -> list[str]:
        """All pieces in the order of ids; a space is '▁'."""
        return [self._processor.id_to_piece(i) for i in range(self.size)]

    @property
    def byte_ids(self) -> range:
        """Ids of the bytes 0 ... 255, which spell characters without a piece; T5 has none."""
        first = self._processor.piece_to_id("<0x00>")
        return range(0) if first == UNK_ID else range(first, first + _BYTES)

    def check_special(self) -> None:
        """Raises InputError unless pad, eos and unk have the ids of T5's vocabularies."""
        if self._has_own_ids:
            found = tuple(self.old_ids[: UNK_ID + 1])
            raise InputError(
                f"{self.path}: pad, eos and unk have the ids {found}: must be "
                f"{(PAD_ID, EOS_ID, UNK_ID)}, as in T5's vocabularies"
            )

    @property
    def has_merges(self) -> bool:
        """True if pieces are merged from pieces (BPE); T5 has a unigram model."""
        return Model.FromString(self._proto).trainer_spec.model_type == _BPE

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Returns the texts of ids.

        Each list ends at its first eos, without padding. Ids outside the vocabulary (a model's
        table may be rounded up) count as unknown. If a list has no eos, it was cut, and an
        incomplete character at its end is left out.
        """
        size, clean = self.size, []
        for row in ids:
            kept = []
            for i in map(int, row):
                if i == EOS_ID:
                    break
                if i != PAD_ID:
                    kept.append(i if 0 <= i < size else UNK_ID)
            else:
                kept = self._whole(kept)
            clean.append(kept)
        texts = self._processor.decode(clean, num_threads=1)
        return [t.replace(_SPACE_SIGN, SPACE) for t in texts] if self.normalises else texts

    def _whole(self, ids: list[int]) -> list[int]:
        """Returns ids without the bytes of an incomplete character at the end."""
        for back, i in enumerate(reversed(ids[-3:]), 1):
            if i not in self.byte_ids:
                break
            byte = i - self.byte_ids.start
            if byte & 0xC0 != 0x80:  # the first byte of a character gives its length
                wanted = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
                return ids[:-back] if back < wanted else ids
        return ids

    def tag_id(self, language: str) -> int:
        """Returns the id of the tag that asks for a translation into `language`."""
        if (tag := tag_symbol(language)) not in self._tags:
            raise InputError(f"{self.path}: no tag {tag}; it knows {', '.join(self.languages)}")
        return self._tags[tag]

    @cached_property
    def languages(self) -> list[str]:
        """Languages with a tag, in the order of ids."""
        return [tag.removeprefix("<2").removesuffix(">") for tag in self._tags if tag != SYNTHETIC]

    @property
    def synthetic_id(self) -> int:
        """The id that marks a source written by a model. Raises InputError if there is none."""
        if SYNTHETIC not in self._tags:
            raise InputError(f"{self.path}: no piece {SYNTHETIC} for synthetic sources")
        return self._tags[SYNTHETIC]

    @property
    def tag_ids(self) -> list[int]:
        """Ids in front of sources: tags, and the mark of synthetic text."""
        return [*self._tags.values()]

    @cached_property
    def _tags(self) -> dict[str, int]:
        """Tag, "<2gl>" or "<bt>", -> id; m4's pieces begin with a space, MADLAD-400's do not."""
        return {
            piece.removeprefix(SPACE): i
            for i, piece in enumerate(self.pieces)
            if _TAG.fullmatch(piece)
        }


def escaped(text: str) -> str:
    """Replaces U+2581 in a text, so that it is not taken for a space."""
    return text.replace(SPACE, _SPACE_SIGN)


def with_pieces(model: bytes, ids: Sequence[int]) -> Any:
    """Returns a SentencePiece model with only these pieces, in this order, for writing."""
    changed = Model.FromString(model)
    pieces = [*changed.pieces]
    del changed.pieces[:]
    changed.pieces.extend(pieces[i] for i in ids)
    changed.trainer_spec.vocab_size = len(ids)
    return changed


def _in_order(model: bytes, old_ids: Sequence[int]) -> bytes:
    """Returns a SentencePiece model with reordered pieces: pad, eos and unk first."""
    changed = with_pieces(model, old_ids)
    spec = changed.trainer_spec
    spec.pad_id, spec.eos_id, spec.unk_id, spec.bos_id = PAD_ID, EOS_ID, UNK_ID, -1
    if changed.pieces[PAD_ID].piece != spec.pad_piece:  # it was <s>
        changed.pieces[PAD_ID].piece = spec.pad_piece
    return changed.SerializeToString(deterministic=True)


def without_tags(model: bytes) -> bytes:
    """Returns the SentencePiece model with tags as control pieces, with the same ids.

    Control pieces are never found in a text, so what users write cannot choose the language.
    """
    changed = Model.FromString(model)
    for piece in changed.pieces:
        if _TAG.fullmatch(piece.piece):
            piece.type = Model.SentencePiece.CONTROL
    return changed.SerializeToString(deterministic=True)


def with_plain_tags(model: bytes) -> bytes:
    """Returns the SentencePiece model with "<2gl>" for "▁<2gl>", like tags of other tokenizers."""
    changed = Model.FromString(model)
    for piece in changed.pieces:
        if _TAG.fullmatch(piece.piece):
            piece.piece = piece.piece.removeprefix(SPACE)
    return changed.SerializeToString(deterministic=True)


class SourceAndTarget:
    """Separate vocabularies for sources, with the tags, and for targets, used as one."""

    def __init__(self, source: Vocabulary, target: Vocabulary) -> None:
        self.source, self.target = source, target
        self.encode, self.tag_id = source.encode, source.tag_id
        self.encode_tagged = source.encode_tagged
        self.encode_targets, self.decode = target.encode, target.decode

    @property
    def path(self) -> Path:
        """Folder of both files."""
        return self.source.path.parent

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of both files."""
        both = f"{self.source.fingerprint} {self.target.fingerprint}"
        return hashlib.sha256(both.encode()).hexdigest()

    @property
    def languages(self) -> list[str]:
        """Languages that have a tag."""
        return self.source.languages


def train(
    path: str | os.PathLike[str], texts: Iterable[str], size: int, languages: Sequence[str]
) -> dict[str, int | float]:
    """Trains a BPE model and writes it to `path`; the same input gives the same file.

    Args:
        size: Number of pieces. Too little text gives the largest possible vocabulary.
        languages: Languages that get a tag.

    Returns:
        requested_size, size, coverage (of characters) and characters.
    """
    tags = tags_of(languages)
    if size < (least := least_size(len(tags))):
        raise SettingError("train.size", size, f"at least {least}")
    free = size - least + _LEAST_PIECES
    lines = [part for text in texts for part in _lines(escaped(normalised(text)))]
    counts = Counter(chain.from_iterable(lines))
    counts.pop(" ", None)
    if not counts:
        raise InputError(f"{path}: no text to train a vocabulary on")
    kept, covered = _keep(counts, free // 2)
    kept -= {*_NO_PIECES}
    dropped = {ord(character): " " for character in counts.keys() - kept}
    lines = [line.translate(dropped) for line in lines]
    model = Model.FromString(_train(lines, size, tags))
    model.normalizer_spec.name = _NFC
    with whole(Path(path)) as unfinished:
        unfinished.write_bytes(model.SerializeToString(deterministic=True))
    return {
        "requested_size": size,
        "size": Vocabulary(path).size,
        "coverage": round(covered, 6),
        "characters": len(kept),
    }


def tags_of(languages: Sequence[str]) -> list[str]:
    """Returns the pieces in front of sources: tags, and the mark of synthetic text."""
    symbols = [*dict.fromkeys(map(tag_symbol, languages))]
    return [SPACE + one for one in symbols + [SYNTHETIC] * any(map(is_synthetic, languages))]


def least_size(tags: int) -> int:
    """Returns the minimum size of a vocabulary with this number of tags."""
    return UNK_ID + 1 + tags + _BYTES + _LEAST_PIECES


def _lines(text: str) -> Iterator[str]:
    """Yields a text in parts that are short enough for training, cut at spaces if possible."""
    while len(text) > _MOST_LINE_CHARACTERS:
        cut = text.rfind(" ", 1, _MOST_LINE_CHARACTERS) + 1 or _MOST_LINE_CHARACTERS
        yield text[:cut].strip()
        text = text[cut:]
    yield text


def _keep(counts: Counter[str], most: int) -> tuple[set[str], float]:
    """Returns the most frequent characters that cover the text, at most `most`, and their share."""
    total, covered, kept = counts.total(), 0, set[str]()
    # Sorted by count, then by code point; Counter's own order is that of first occurrence.
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(kept) >= most or covered >= _COVERAGE * total:
            break
        kept.add(character)
        covered += count
    return kept, covered / total


def _train(lines: list[str], size: int, tags: list[str]) -> bytes:
    """Trains a model; if the text has fewer pieces than `size`, trains again with that number."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=size,
            byte_fallback=True, split_digits=True, pad_id=PAD_ID, eos_id=EOS_ID, unk_id=UNK_ID,
            bos_id=-1, user_defined_symbols=tags, normalization_rule_name="identity",
            max_sentence_length=_MOST_LINE_BYTES, character_coverage=1.0,
            shuffle_input_sentence=False, num_threads=1, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        most = re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", str(error))
        if most is None:
            raise InputError(f"the vocabulary cannot be trained: {error}") from error
        return _train(lines, int(most[1]), tags)
    return model.getvalue()
