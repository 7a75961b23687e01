"""`m4 decode --input`: translates text files with the trained model."""

import dataclasses
import itertools
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from m4.data.directions import split_direction
from m4.eval.decoding.decode import BatchCounts, Translations, cut_said, warn
from m4.eval.decoding.hypotheses import t5x_line
from m4.eval.decoding.translate import (
    UNENDED,
    Line,
    Translator,
    check_language,
    first_text,
    json_line,
    translate_lines,
)
from m4.eval.text import STANDARD, Output, Text, outputs_of, texts_of
from m4.experiment import Experiment
from m4.jobs.corpus import open_vocabulary
from m4.jobs.decoding.testsets import loaded, trained_step
from m4.parallel import distributed
from m4.progress import ProgressBar
from m4.settings import InputError, counted
from m4.storage.files import write_json

# Batches in a window of lines, which are sorted by length. A killed job loses one window.
_BATCHES_A_WINDOW = 32
# Maximum characters in a window: with long lines, it has fewer of them.
_WINDOW_CHARACTERS = 1 << 20
_NAMED = 5  # reports of lines that are too long
# Form -> function (line, its translations, their language) -> line of the file.


def tsv_line(line: str, found: Translations, to: str) -> str:
    """Returns a line and its translation as a TSV pair, English first."""
    sides = " ".join(line.split()), " ".join(found.texts[0].split())
    return "\t".join(sides[::-1] if to == "en" else sides)


_FORMS: Mapping[str, Callable[[str, Translations, str], str]] = {
    "text": first_text, "json": json_line, "t5x": t5x_line, "tsv": tsv_line,
}  # fmt: skip


class Missing(NamedTuple):
    """A line missing in an output: its number from 1, its text, and the text to translate."""

    output: Output
    number: int
    given: str
    source: str


def decode_text(
    experiment: Experiment, inputs: Sequence[str], targets: Sequence[str], output: str, *,
    source: str | None, step: int | None, overwrite: bool, form: str,
) -> None:  # fmt: skip
    """Translates texts; keeps existing translations and continues those of a killed job.

    Args:
        inputs: Files, folders, or "-".
        targets: Target languages, or ["all"] for all of the model.
        output: A file, a folder, or "-".
        source: Language of the input. Defaults to English, or to the model's only one.
        overwrite: Whether to replace existing translations.
        form: Form of the lines: text, json, t5x or tsv.
    """
    with _texts(inputs) as (inputs, texts):
        directions = open_vocabulary(experiment).directions
        source, targets = _languages(source, targets, directions)
        folder = experiment.folder
        trained_step(folder, step)
        suffix = {"text": "txt", "tsv": "tsv"}.get(form, "jsonl")
        outputs = outputs_of(inputs, texts, targets, output, suffix)
        checked = {text: text.checked() for text in texts}
        model, about = loaded(experiment, step)
        translator = dataclasses.replace(model, source=source)
        made_by = about | ({} if form == "text" else {form: True})
        if translator.directions(targets) is not None:
            made_by |= {"from": source}

        def begin() -> list[int]:
            for one in outputs:
                lines, digest = checked[one.text]
                about = {**made_by, "to": one.to, "input's lines": lines, "input": digest}
                one.begin(about, lines, overwrite)
            return [-1 if one.done else one.lines for one in outputs]

        there = distributed.on_primary_then_broadcast("the outputs", begin)
        for one, lines in zip(outputs, there, strict=True):
            one.done, one.lines, one.whole = lines < 0, max(lines, 0), checked[one.text][0]
        where = sys.stderr if output == STANDARD else sys.stdout
        missing = [one for one in outputs if not one.done]
        _translate(translator, missing, form, where)
        if form == "tsv" and distributed.is_primary():
            for one in filter(lambda one: one.path, missing):
                about = {"run": experiment.model_dir, **made_by, "from": source, "to": one.to}
                write_json(Path(f"{one.path}.json"), about | {"input": one.text.shown}, indent=1)


@contextmanager
def _texts(inputs: Sequence[str]) -> Iterator[tuple[Sequence[str], list[Text]]]:
    """Yields names and texts of --input; standard input becomes a file that can be read twice."""
    if STANDARD not in inputs:
        yield inputs, texts_of(inputs)
        return
    if len(inputs) > 1 or distributed.is_distributed():
        raise InputError("--input=-: standard input alone, for one process")
    with tempfile.TemporaryDirectory(prefix="m4-input-") as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        (text,) = texts_of([str(path)])
        yield [str(path)], [text._replace(shown="standard input")]


def _languages(
    source: str | None, asked: Sequence[str], directions: Sequence[str]
) -> tuple[str, list[str]]:
    """Returns the language of the input and the target languages."""
    pairs = [split_direction(direction) for direction in directions]
    sources, known = ([*dict.fromkeys(side)] for side in zip(*pairs, strict=True))
    targets = list(dict.fromkeys(asked))
    if targets != ["all"]:
        for to in targets:
            check_language(to, known)
    if source is None:
        others = [one for one in sources if one not in targets]
        source = "en" if "en" in others else others[0] if len(others) == 1 else None
    if source is None:
        raise InputError(f"--from: the model translates from {', '.join(sources)}; give one")
    if source not in sources:
        raise InputError(
            f"--from={source}: the model does not translate from it; it knows: {', '.join(sources)}"
        )
    if targets == ["all"]:
        targets = [to for one, to in pairs if one == source]
    if source in targets:
        raise InputError(f"--to={source}: that is the language of the input (--from={source})")
    if (untrained := [to for to in targets if (source, to) not in pairs]) and (
        distributed.is_primary()
    ):
        warn(f"{source}-{', '.join(untrained)}: the model was not trained on this direction")
    return source, targets


def missing_lines(outputs: Sequence[Output], normalise: Callable[[str], str]) -> Iterator[Missing]:
    """Yields the lines missing in the outputs, reading each text once."""
    for text, group in itertools.groupby(outputs, lambda output: output.text):
        each = list(group)
        for number, given in enumerate(itertools.islice(text.lines(), each[0].whole), 1):
            lacking = [output for output in each if number > output.lines]
            source = normalise(given) if lacking else ""
            for output in lacking:
                yield Missing(output, number, given, source)


def windows(lines: Iterator[Missing], most_lines: int) -> Iterator[list[Missing]]:
    """Yields lines in windows, reading each on demand."""
    window: list[Missing] = []
    characters = 0
    for line in lines:
        window.append(line)
        characters += len(line.source)
        if len(window) >= most_lines or characters > _WINDOW_CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


def _translate(translator: Translator, outputs: Sequence[Output], form: str, where: TextIO) -> None:
    """Translates all missing lines into their outputs, window by window; messages go to `where`."""
    done, total = sum(one.lines for one in outputs), sum(one.whole for one in outputs)
    if done:
        print(f"{done:,} of {total:,} lines are translated already", file=where)
    batches, names = BatchCounts(), itertools.count(1)
    most = _BATCHES_A_WINDOW * translator.decoding.batch_rows
    with ProgressBar("decode", total, "lines", where) as bar:
        bar.update(done)
        for window in windows(missing_lines(outputs, translator.normalise), most):

            def too_long(i: int, said: str, window: list[Missing] = window) -> None:
                number = next(names) if distributed.is_primary() else 0
                if 0 < number <= _NAMED:
                    warn(f"{window[i].output.text.shown} line {window[i].number}: {said}")
                elif number == _NAMED + 1:
                    warn("more lines are too long; their number comes at the end")

            def progress(lines: int, before: int = done) -> None:
                rate = batches.tokens / batches.seconds
                bar.update(before + lines, f"{rate:,.0f} tokens/s")

            lines = [Line(one.source, one.output.to) for one in window]
            found = translate_lines(translator, lines, batches, progress, too_long)
            mine: dict[int, tuple[Output, list[str], list[Counter[str]]]] = {}
            for one, (each, counts) in zip(window, found, strict=True):
                _, texts, sums = mine.setdefault(id(one.output), (one.output, [], []))
                texts.append(_FORMS[form](one.given, each, one.output.to))
                sums.append(+counts)
            for output, texts, sums in mine.values():
                output.append(texts, sums)
            done += len(window)
    if not distributed.is_primary():
        return
    for one in outputs:
        if one.lines < one.whole:
            said = "the input has changed while it was translated; --overwrite begins again"
            raise InputError(f"{one.path}: {one.lines:,} lines of {one.whole:,}: {said}")
    for line in _said(sum((one.counts for one in outputs), Counter()), translator):
        print(line, file=where)
    print(batches.said(), file=where)


def _said(counts: Mapping[str, int], translator: Translator) -> Iterator[str]:
    """Yields the final messages on all lines, including those that an earlier job translated."""
    yield (
        f"{counted(counts['lines'], 'line')}, {counts['blank']:,} blank, "
        f"{counts['split']:,} too long for max_source_length = "
        f"{translator.decoding.max_source_length} and translated in chunks"
    )
    for name, said in (
        ("cut", "sentences were too long even so, and cut at a space or a character"),
        ("shortened", "chunks could not be cut further: their ends are not translated"),
    ):
        if counts[name]:
            yield f"{counts[name]:,} {said}"
    if cut := {int(name.split()[1]): n for name, n in counts.items() if name.startswith(UNENDED)}:
        yield cut_said(cut, translator.decoding, translator.factors)
