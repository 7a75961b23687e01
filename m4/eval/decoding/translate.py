"""Translates lines: a list of them, or what a user types or pipes in, each answered at once."""

import difflib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, TextIO

from m4.data.directions import split_direction
from m4.data.languages import describe
from m4.data.preprocess import tag
from m4.data.sentences import Chunks, chunks, joined
from m4.data.sources.reading.lines import Reason, carriage_return, line_of
from m4.data.vocabulary.vocabulary import SourceAndTarget, Vocabulary
from m4.eval.decoding.decode import (
    BatchCounts,
    TrainedModel,
    Translations,
    as_json,
    translations,
    warn,
)
from m4.settings import InputError

UNENDED = "unended "
_PIPE_BYTES = 1 << 16  # what a pipe holds on Linux
# Waiting lines are taken this many batches at a time: sorted by length, they fill batches better.
_BATCHES_AT_ONCE = 4


def check_language(to: str, languages: Sequence[str]) -> None:
    """Raises InputError, with the nearest match and all languages, if `to` is none of them."""
    if to in languages:
        return
    by_name = {}
    for code in languages:
        known = describe(code)
        for name in (code, known.code, known.iso639_3, known.name):
            by_name.setdefault(name.lower(), code)
    wanted = to.lower().replace("-", "_")
    known_as = describe(to).code.lower()  # 'glg' and 'gl' are the same language
    near = known_as if known_as in by_name else wanted
    match = difflib.get_close_matches(near, by_name, n=1)
    code = by_name[match[0]] if match else ""
    hint = f" Did you mean {code} ({describe(code).name})?" if code else ""
    raise InputError(
        f"to = {to!r}: this model does not translate into it.{hint} "
        f"It knows: {', '.join(languages)}"
    )


# (a line, its translations) -> what is written for it
Written = Callable[[str, Translations], str]


def first_text(line: str, found: Translations) -> str:
    """Returns the translation alone."""
    return found.texts[0]


def all_texts(line: str, found: Translations) -> str:
    """Returns all translations, one a line, the best first."""
    return "\n".join(found.texts)


def json_line(line: str, found: Translations, to: str) -> str:
    """Returns the line, its target language, its translations and their scores as JSON."""
    said = {"source": line, "to": to, **as_json(found)}
    return json.dumps(said, ensure_ascii=False)


@dataclass(frozen=True)
class Translator(TrainedModel):
    """A model ready to translate lines of text."""

    vocabulary: Vocabulary | SourceAndTarget
    # Lines that are translated together, in the place of decoding.batch_rows: of what a user types
    # few are waiting.
    batch_rows: int = 8
    normalise: Callable[[str], str] = str  # what training does to a text
    trained: Sequence[str] = ()  # directions of training, in their order
    source: str | None = None  # language of the lines, for a gate by task; defaults to English

    def directions(self, to: str, lines: int) -> list[int] | None:
        """Returns the direction of each line, or None for a model that does not look at them.

        Raises:
            InputError: The model routes by task, and was not trained on this direction.
        """
        if not getattr(self.model, "by_task", False):
            return None
        direction = f"{self.source or 'en'}-{to}"
        if direction not in self.trained:
            raise InputError(
                f"--from={self.source or 'en'}, --to={to}: the experts of this model depend on the "
                f"direction, and {direction} is none of {', '.join(self.trained)}"
            )
        return [self.trained.index(direction)] * lines

    @property
    def languages(self) -> Sequence[str]:
        """The languages that it was trained to translate into, or all with a tag."""
        targets = [split_direction(direction)[1] for direction in self.trained]
        return list(dict.fromkeys(targets)) or self.vocabulary.languages

    def candidates(
        self,
        lines: Sequence[str],
        to: str,
        *,
        prefix: str | Sequence[str] | None = None,
        first_line: int = 1,
    ) -> list[Translations]:
        """Translates lines in any language of the model into the language `to`, in their order.

        Each has `decoding.n_best` translations, the best first; an empty line has an empty one. A
        line that is too long is translated in chunks, and a warning with its number (counted from
        `first_line`) goes to stderr. `prefix` is text that the translations begin with, one or one
        a line. It defaults to `decoding.prefix`.

        Raises:
            InputError: The model has no language `to`, or a line has a carriage return inside.
            TypeError: `lines` is one text.
        """
        if isinstance(lines, str):
            raise TypeError("lines: must be a list of texts, not one text")
        prefixes = [prefix] * len(lines) if isinstance(prefix, str) else prefix
        if prefixes is not None and len(prefixes) != len(lines):
            raise InputError(f"{len(prefixes)} prefixes for {len(lines)} lines: must be as many")
        check_language(to, self.languages)
        for number, line in enumerate(lines, first_line):
            if why := carriage_return(line.removesuffix("\n").removesuffix("\r")):
                raise InputError(f"line {number}: {why}")
        lines = [self.normalise(line) for line in lines]
        if prefixes is not None:
            prefixes = [self.normalise(each) for each in prefixes]

        def too_long(index: int, said: str) -> None:
            warn(f"line {first_line + index}: {said} (Decoding.max_source_length)")

        small = replace(self, decoding=replace(self.decoding, batch_rows=self.batch_rows))
        found = translate_lines(
            small, [Line(line, to) for line in lines], BatchCounts(), lambda _: None, too_long,
            prefixes,
        )  # fmt: skip
        for number, (_, counts) in enumerate(found, first_line):
            for limit in (name.removeprefix(UNENDED) for name in counts if UNENDED in name):
                said = f"the translation is cut at its limit of {limit} tokens, without an end"
                warn(f"line {number}: {said}")
        return [each for each, _ in found]

    def stream(self, source: int, to: str, output: TextIO, *, written: Written = first_text) -> int:
        """Translates the lines of a file descriptor (stdin: 0) as they come; returns their number.

        Lines that are already waiting are translated together, a few batches at a time. No line
        waits for a later one to come: all are written and flushed before more is read.
        `written` makes the text that is written of a line and its translations.

        Raises:
            InputError: The model has no language `to`, or a line is no text (lines before it are
                answered).
        """
        check_language(to, self.languages)
        number, most = 0, _BATCHES_AT_ONCE * self.batch_rows
        for waiting in waiting_lines(source):
            for start in range(0, len(waiting), most):
                lines, bad = _decode_lines(waiting[start : start + most])
                found = self.candidates(lines, to, first_line=number + 1)
                for line, each in zip(lines, found, strict=True):
                    try:
                        output.write(written(line, each) + "\n")
                        output.flush()
                    except OSError as error:
                        error.filename = f"the translation of line {number + 1}"
                        raise
                    number += 1
                if bad is not None:
                    raise InputError(f"line {number + 1}: {bad}")
        return number


def waiting_lines(source: int) -> Iterator[list[bytes]]:
    """Yields the complete lines that a file descriptor has ready, without their line ends.

    os.read returns as soon as there is anything, unlike Python's buffered files, which would wait
    for a full buffer. A last line may lack its line end.
    """
    rest = b""
    try:
        while chunk := os.read(source, _PIPE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if lines:
                yield lines
    except OSError as error:  # a folder, a file that is open for writing alone
        raise InputError(f"standard input cannot be read: {error.strerror}") from error
    if rest:
        yield [rest]


def _decode_lines(raw: Sequence[bytes]) -> tuple[list[str], Reason | None]:
    """Returns lines as text up to the first that is none, and what is wrong with that one."""
    lines = []
    for line in map(line_of, raw):
        if isinstance(line, Reason):
            return lines, line
        lines.append(line)
    return lines, None


class Line(NamedTuple):
    """A normalised line and the language to translate it into."""

    source: str
    to: str


def translate_lines(
    translator: Translator,
    lines: Sequence[Line],
    batches: BatchCounts,
    progress: Callable[[int], None],
    too_long: Callable[[int, str], None],
    prefixes: Sequence[str] | None = None,
) -> list[tuple[Translations, Counter[str]]]:
    """Translates lines; one that is too long in chunks, a blank one not at all.

    Args:
        prefixes: Text that each translation begins with. Defaults to `Decoding.prefix`.
        batches: Counts what is in the batches.
        progress: Called after every batch with the number of lines that are done, about.
        too_long: Called with the index of a line that is too long and what becomes of it.

    Returns:
        The translations of each line, and what was counted of it: lines, blank, split (lines in
        chunks), chunks, cut (sentences that were cut to fit), shortened (chunks that no cut makes
        fit), "unended LIMIT" (translations at this limit).
    """
    each = _chunks(translator, lines, too_long)
    counts = [Counter(lines=1, blank=not found.texts, split=len(found.texts) > 1, cut=found.cut,
                      chunks=len(found.texts)) for found in each]  # fmt: skip
    sources = [(i, text) for i, found in enumerate(each) for text in found.texts]
    begins = prefixes or [translator.normalise(translator.decoding.prefix or "")] * len(lines)
    begins = [begins[i] if k == 0 else "" for i, found in enumerate(each)
              for k, _ in enumerate(found.texts)]  # fmt: skip

    def on_cut(index: int, pieces: int, limit: int) -> None:
        counts[sources[index][0]]["shortened"] += 1
        too_long(sources[index][0], f"{pieces} pieces, cut to {limit}")

    batches.unended = []
    done = iter(
        translations(
            translator, [tag(text, lines[i].to) for i, text in sources],
            prefixes=begins, directions=_directions(translator, [lines[i].to for i, _ in sources]),
            progress=lambda done, all_sentences, _: progress(len(lines) * done // all_sentences),
            on_cut=on_cut, on_batch=batches,
        )
    )  # fmt: skip
    for index, limit in batches.unended:
        counts[sources[index][0]][f"{UNENDED}{limit}"] += 1
    whole = [together([next(done) for _ in found.texts], line.to)
             for line, found in zip(lines, each, strict=True)]  # fmt: skip
    return list(zip(whole, counts, strict=True))


def _directions(translator: Translator, targets: Sequence[str]) -> list[int] | None:
    """Returns the direction of each source, or None for a model that does not look at them."""
    by_target = {to: translator.directions(to, 1) for to in set(targets)}
    found = [each for to in targets for each in by_target[to] or ()]
    return found or None


def _chunks(
    translator: Translator, lines: Sequence[Line], too_long: Callable[[int, str], None]
) -> list[Chunks]:
    """Returns the chunks that are translated of each line."""
    most = translator.decoding.max_source_length

    def pieces(lines: Sequence[Line]) -> list[int]:
        tagged = [tag(line.source, line.to) for line in lines]
        return [len(ids) + 1 for ids in translator.vocabulary.encode_tagged(tagged)]

    found = []
    for i, (line, size) in enumerate(zip(lines, pieces(lines), strict=True)):
        split = Chunks([line.source] if line.source.strip() else [], 0)
        if size > most:
            split = chunks(
                line.source, lambda text, to=line.to: pieces([Line(text, to)])[0] <= most
            )
            more = f", {split.cut} sentences cut to fit" if split.cut else ""
            too_long(i, f"{size} pieces, translated in {len(split.texts)} chunks{more}")
        found.append(split)
    return found


def together(chunks: Sequence[Translations], to: str) -> Translations:
    """Joins the translations of a line's chunks rank by rank; scores become means.

    A chunk without so many translations has its last one again. Without chunks the translation is
    empty.
    """
    if not chunks:
        return Translations([""], [0.0])
    most = max(len(each.texts) for each in chunks)
    ranks = [[min(rank, len(each.texts) - 1) for each in chunks] for rank in range(most)]

    def means(values: Sequence[Sequence[float]]) -> list[float]:
        return [fmean(each[k] for each, k in zip(values, rank, strict=True)) for rank in ranks]

    gains = [each.utilities for each in chunks if each.utilities is not None]
    # Byte fallback can spell a line break; a line must stay one line.
    texts = [
        joined(
            [" ".join(each.texts[k].splitlines()) for each, k in zip(chunks, rank, strict=True)], to
        )
        for rank in ranks
    ]
    return Translations(
        texts, means([each.scores for each in chunks]), means(gains) if gains else None
    )
