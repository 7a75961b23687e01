"""Translation of lines: a list, or what a user types or pipes in, with immediate answers."""

import difflib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, TextIO

import numpy as np

from m4.data.directions import split_direction
from m4.data.languages import describe
from m4.data.preprocess import tag
from m4.data.sentences import Chunks, chunks, joined
from m4.data.sources.reading.lines import Reason, carriage_return, line_of
from m4.data.vocabulary.vocabulary import SourceAndTarget, Vocabulary
from m4.eval.decoding.decode import (
    Batch,
    BatchCounts,
    TrainedModel,
    Translations,
    as_json,
    translations,
    warn,
)
from m4.settings import InputError

UNENDED = "unended "
_PIPE_BYTES = 1 << 16  # capacity of a pipe on Linux
# Number of batches of waiting lines taken at a time: sorted by length, lines fill batches better.
_BATCHES_AT_ONCE = 4


def check_language(to: str, languages: Sequence[str]) -> None:
    """Raises InputError, with the nearest match and all languages, if `to` is not known."""
    if to in languages:
        return
    by_name: dict[str, str] = {}
    for code, known in zip(languages, map(describe, languages), strict=True):
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


# (line, its translations, their language) -> text to write
Written = Callable[[str, Translations, str], str]


def first_text(line: str, found: Translations, to: str) -> str:
    """Returns the best translation as text."""
    return found.texts[0]


def json_line(line: str, found: Translations, to: str) -> str:
    """Returns the line, its target language, its translations and their scores as JSON."""
    return json.dumps({"source": line, "to": to, **as_json(found)}, ensure_ascii=False)


@dataclass(frozen=True)
class Translator(TrainedModel):
    """A model ready to translate lines of text."""

    vocabulary: Vocabulary | SourceAndTarget
    # Number of lines translated together, few for a user who types (default: decoding.batch_rows).
    batch_rows: int = 8
    normalise: Callable[[str], str] = str  # normalisation of training text
    trained: Sequence[str] = ()  # training directions, in order
    source: str | None = None  # language of the lines, for a gate by task (default: English)

    def directions(self, targets: Sequence[str]) -> list[int] | None:
        """Returns the direction of each line, or None for a model that ignores them.

        Raises:
            InputError: The model routes by task, and was not trained on a direction.
        """
        if not getattr(self.model, "by_task", False):
            return None
        number = {name: number for number, name in enumerate(self.trained)}
        source = self.source or "en"
        for to in targets:
            if f"{source}-{to}" not in number:
                raise InputError(
                    f"--from={source}, --to={to}: the experts of this model depend on the "
                    f"direction, and {source}-{to} is none of {', '.join(self.trained)}"
                )
        return [number[f"{source}-{to}"] for to in targets]

    @property
    def languages(self) -> Sequence[str]:
        """Trained target languages, or all with a tag."""
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
        """Translates lines in any language of the model into the language `to`, in order.

        Each line gets `decoding.n_best` translations, the best first; an empty line gets an empty
        one. A line that is too long is translated in chunks, and a warning with its number (counted
        from `first_line`) goes to stderr. `prefix` is text that translations begin with, one for
        all or one per line. Raises InputError if the model lacks the language `to`, or a line has a
        carriage return inside.
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
        """Translates lines of a file descriptor (stdin: 0) as they come; returns their number.

        Waiting lines are translated together, a few batches at a time. No line waits for a later
        one: all are written and flushed before more is read. Raises InputError if the model lacks
        the language `to`, or a line is not text (after answering the lines before it).
        """
        check_language(to, self.languages)
        number, most = 0, _BATCHES_AT_ONCE * self.batch_rows
        for waiting in waiting_lines(source):
            for start in range(0, len(waiting), most):
                some = [*map(line_of, waiting[start : start + most])]
                lines = [*itertools.takewhile(lambda one: not isinstance(one, Reason), some)]
                found = self.candidates(lines, to, first_line=number + 1)
                for line, each in zip(lines, found, strict=True):
                    try:
                        output.write(written(line, each, to) + "\n")
                        output.flush()
                    except OSError as error:
                        error.filename = f"the translation of line {number + 1}"
                        raise
                    number += 1
                if len(lines) < len(some):
                    raise InputError(f"line {number + 1}: {some[len(lines)]}")
        return number


def waiting_lines(source: int) -> Iterator[list[bytes]]:
    """Yields the complete lines that a file descriptor has ready; the last may lack its end."""
    rest = b""  # os.read returns any available input; Python's files wait for a buffer
    try:
        while chunk := os.read(source, _PIPE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if lines:
                yield lines
    except OSError as error:  # a folder, or a file that is open only for writing
        raise InputError(f"standard input cannot be read: {error.strerror}") from error
    if rest:
        yield [rest]


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
    """Translates lines: long ones in chunks, blank ones not at all.

    Args:
        prefixes: Text that each translation begins with. Defaults to `Decoding.prefix`.
        batches: Counter of sentences and tokens.
        progress: Called after every batch with the approximate number of finished lines.
        too_long: Called with the index of a line that is too long and a message.

    Returns:
        The translations of each line, and its counts: lines, blank, split (lines in chunks),
        chunks, cut (sentences that were cut to fit), shortened (chunks that could not be cut
        enough), "unended LIMIT" (translations at this limit).
    """
    each = _chunks(translator, lines, too_long)
    # Integers, not bools: a job that resumes reads them from its file, and checks them.
    counts = [Counter(lines=1, blank=int(not found.texts), split=int(len(found.texts) > 1),
                      cut=found.cut, chunks=len(found.texts)) for found in each]  # fmt: skip
    begins = prefixes or [translator.normalise(translator.decoding.prefix or "")] * len(lines)
    sources = [(i, text, "" if k else begins[i]) for i, found in enumerate(each)
               for k, text in enumerate(found.texts)]  # fmt: skip
    before = batches.sentences

    def on_cut(index: int, pieces: int, limit: int) -> None:
        counts[sources[index][0]]["shortened"] += 1
        too_long(sources[index][0], f"{pieces} pieces, cut to {limit}")

    def on_batch(batch: Batch, best_BT: np.ndarray) -> None:
        batches(batch, best_BT)
        progress(len(lines) * (batches.sentences - before) // len(sources))

    batches.unended = []
    done = iter(
        translations(
            translator, [tag(text, lines[i].to) for i, text, _ in sources],
            prefixes=[begin for *_, begin in sources],
            directions=translator.directions([lines[i].to for i, *_ in sources]),
            on_cut=on_cut, on_batch=on_batch,
        )
    )  # fmt: skip
    for index, limit in batches.unended:
        counts[sources[index][0]][f"{UNENDED}{limit}"] += 1
    whole = [together([next(done) for _ in found.texts], line.to)
             for line, found in zip(lines, each, strict=True)]  # fmt: skip
    return list(zip(whole, counts, strict=True))


def _chunks(
    translator: Translator, lines: Sequence[Line], too_long: Callable[[int, str], None]
) -> list[Chunks]:
    """Returns the chunks of each line."""
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
    """Joins the translations of a line's chunks by rank; scores become means.

    A chunk with fewer translations repeats its last one. Without chunks, the translation is empty.
    """
    if not chunks:
        return Translations([""], [0.0])
    texts, scores, gains = [], [], []
    for rank in range(max(len(each.texts) for each in chunks)):
        at = [(each, min(rank, len(each.texts) - 1)) for each in chunks]
        # Byte fallback can spell a line break; a line must stay one line.
        texts.append(joined([" ".join(each.texts[k].splitlines()) for each, k in at], to))
        scores.append(fmean(each.scores[k] for each, k in at))
        gains.append([each.utilities[k] for each, k in at if each.utilities is not None])
    return Translations(texts, scores, [*map(fmean, gains)] if all(gains) else None)
