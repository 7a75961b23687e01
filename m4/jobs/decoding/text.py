"""`m4 decode --input`: files of text, translated with the trained model."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from etils import epath

from m4.data.preprocess import split_direction
from m4.eval.decoding.decode import warn
from m4.eval.decoding.translate import check_language
from m4.eval.text.inputs import STANDARD, Text, Wanted, texts_of, wanted
from m4.eval.text.translated import LINES, Output, TextTranslator, windows
from m4.eval.text.work_file import WorkFile
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.corpus import open_vocabulary
from m4.jobs.decoding.ready_model import ReadyModel, trained
from m4.jobs.decoding.testsets import trained_step
from m4.parallel import distributed
from m4.progress import ProgressBar
from m4.settings import InputError

# A window of lines is this many batches: what is lost where the job is killed, and enough to sort.
_BATCHES_A_WINDOW = 32


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        inputs: files, folders, or "-". targets: languages; ("all",): all that the model knows.
        output: a file, a folder, or "-". source: the language of the input, None: English, or the
            only one that the model knows. format: of the lines, a name of `LINES`.
    """

    inputs: Sequence[str]
    targets: Sequence[str]
    output: str
    source: str | None = None
    overwrite: bool = False
    format: str = "text"


@dataclasses.dataclass
class _Standard:
    """Standard output as an output."""

    stream: TextIO
    lines: int = 0

    def append(self, lines: Sequence[str], counts: Mapping[str, int]) -> None:
        self.stream.writelines(f"{line}\n" for line in lines)
        self.stream.flush()
        self.lines += len(lines)


@dataclasses.dataclass
class _File:
    """A file as an output: it is finished, and named, when it has all lines of its text."""

    work: WorkFile
    whole: int

    def __post_init__(self) -> None:
        self._finish()  # a job was killed just before it did; or the text is empty

    @property
    def lines(self) -> int:
        return self.work.lines

    def append(self, lines: Sequence[str], counts: Mapping[str, int]) -> None:
        if self.work.done:
            raise _changed(self)
        self.work.append(lines, counts)
        self._finish()

    def _finish(self) -> None:
        if self.work.lines == self.whole:
            self.work.finish()
            print(f"{self.work.output}: {self.whole:,} lines")


def _changed(file: _File) -> InputError:
    return InputError(
        f"{file.work.output}: {file.lines:,} lines of {file.whole:,}: the input has changed while "
        "it was translated; --overwrite begins again"
    )


@dataclasses.dataclass
class _Elsewhere:
    """An output that the primary process writes."""

    lines: int

    def append(self, lines: Sequence[str], counts: Mapping[str, int]) -> None:
        self.lines += len(lines)


def decode_text(experiment: Experiment, request: Request, step: int | None = None) -> None:
    """Translates the texts; what is there stays, what a killed job left is continued.

    Several processes search together; the primary reads standard input and writes.

    Raises:
        InputError: a language that the model does not know, a file that is not there or is no text,
            an output that cannot be, a folder without a checkpoint.
    """
    with ExitStack() as stack:
        inputs, texts = stack.enter_context(_texts(request.inputs))
        targets = _targets(request, open_vocabulary(experiment).directions)
        folder = prepare.run_folder(experiment)
        distributed.on_primary_then_broadcast("checkpoints", lambda: trained_step(folder, step))
        suffix = "txt" if request.format == "text" else "jsonl"
        made = wanted(inputs, texts, targets, request.output, suffix)
        checked = {text: text.checked() for text in texts}
        model = trained(experiment, step)
        if request.format != "text":
            model.made_by[request.format] = True
        outputs = _outputs(made, checked, model, request.overwrite, stack)
        where = sys.stderr if request.output == STANDARD else sys.stdout
        translate = TextTranslator(model.translator, LINES[request.format])
        counts = {text: lines for text, (lines, _) in checked.items()}
        _translate(model, translate, outputs, counts, where)


@contextmanager
def _texts(inputs: Sequence[str]) -> Iterator[tuple[Sequence[str], list[Text]]]:
    """The texts, and the names of --input; standard input as a file, which can be read twice."""
    if STANDARD not in inputs:
        yield inputs, texts_of(inputs)
        return
    if len(inputs) > 1 or distributed.is_distributed():
        raise InputError("--input=-: standard input alone, for one process")
    with tempfile.TemporaryDirectory(prefix="m4-input-") as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield [str(path)], [Text(epath.Path(path), "standard input")]


def _targets(request: Request, directions: Sequence[str]) -> list[str]:
    """The languages to translate into.

    Raises:
        InputError: one that the model does not know, or no source language where it must be given.
    """
    pairs = [split_direction(direction) for direction in directions]
    sources, known = ([*dict.fromkeys(side)] for side in zip(*pairs, strict=True))
    source = request.source
    targets = list(dict.fromkeys(request.targets))
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
    return targets


def _outputs(
    made: Sequence[Wanted],
    checked: Mapping[Text, tuple[int, str]],
    model: ReadyModel,
    overwrite: bool,
    stack: ExitStack,
) -> dict[Text, dict[str, Output]]:
    """Text -> language -> output, of those that are not there yet."""
    files: list[Output | None] = []

    def opened() -> list[int]:
        for one in made:
            lines, digest = checked[one.text]
            if one.output is None:
                files.append(_Standard(sys.stdout))
                continue
            one.output.parent.mkdir(parents=True, exist_ok=True)
            about = {**model.made_by, "to": one.to, "input's lines": lines, "input": digest}
            file = WorkFile(one.output, about, overwrite=overwrite)
            stack.callback(file.close)
            if file.done:
                print(f"{one.output}: already there (--overwrite replaces it)")
            files.append(None if file.done else _File(file, lines))
        return [-1 if file is None else file.lines for file in files]

    there = distributed.on_primary_then_broadcast("the outputs", opened)
    outputs: dict[Text, dict[str, Output]] = {}
    for number, (one, lines) in enumerate(zip(made, there, strict=True)):
        if lines >= 0:
            output = files[number] if files else _Elsewhere(lines)
            assert output is not None
            outputs.setdefault(one.text, {})[one.to] = output
    return outputs


def _translate(
    model: ReadyModel,
    translate: TextTranslator,
    outputs: Mapping[Text, Mapping[str, Output]],
    lines: Mapping[Text, int],
    where: TextIO,
) -> None:
    every = [(lines[text], output) for text, each in outputs.items() for output in each.values()]
    done, total = sum(output.lines for _, output in every), sum(count for count, _ in every)
    before = Counter[str]()
    for _, output in every:
        before.update(output.work.counts if isinstance(output, _File) else {})
    if done:
        print(f"{done:,} of {total:,} lines are translated already", file=where)
    with ProgressBar("decode", total, "lines", where) as bar:
        bar.update(done)
        most = _BATCHES_A_WINDOW * model.translator.decoding.batch_rows
        for window in windows(outputs, model.translator.normalise, most):
            translate(window, functools.partial(_show, bar, done))
            done += len(window)
    if distributed.is_primary():
        for _, output in every:
            if isinstance(output, _File) and not output.work.done:
                raise _changed(output)
        for line in _said(before + translate.counts, model):
            print(line, file=where)
        print(translate.batches.said(), file=where)


def _show(bar: ProgressBar, before: int, lines: int, rate: str) -> None:
    bar.update(before + lines, rate)


def _said(counts: Counter[str], model: ReadyModel) -> Iterator[str]:
    """What the end says of the lines, also of those that an earlier job translated."""
    settings = model.translator.decoding
    yield (
        f"{counts['lines']:,} lines, {counts['blank']:,} blank, {counts['split']:,} too long for "
        f"max_source_length = {settings.max_source_length} and translated in chunks"
    )
    for name, said in (
        ("cut", "sentences were too long even so, and cut at a space or a character"),
        ("shortened", "chunks could not be cut further: their ends are not translated"),
        ("unended", f"translations reach their limit (max_target_length = "
                    f"{settings.max_target_length}) without an end"),
    ):  # fmt: skip
        if counts[name]:
            yield f"{counts[name]:,} {said}"
