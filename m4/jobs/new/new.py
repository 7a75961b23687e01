"""`m4 new`: looks at a folder of sentence pairs and writes a gin file for it."""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from m4 import config
from m4.data.languages import describe, is_english
from m4.data.sources import SPLITS
from m4.data.sources.gettext import ENGLISH_CATALOGUE
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.new import choosing, counting, writing
from m4.jobs.new.asking import Asking
from m4.jobs.new.choosing import Choice, Estimate, Machine
from m4.jobs.new.counting import Counted, Lengths
from m4.jobs.new.looking import EXPECTED, FoundCorpus, look
from m4.progress import ProgressBar
from m4.settings import InputError

_BAD_FILES = 20  # that are printed
# Beyond it repeating gives next to nothing (Muennighoff et al. 2023).
_OFTEN = 16
_LEAST_IN_SCRIPT = 0.5


def new(folder: str, out: str | None, yes: bool) -> Path:
    """Writes the gin file of a corpus, by default <name of the folder>.gin; returns its path.

    yes: takes every default instead of asking.

    Raises:
        InputError: the file is there, or would be in the folder; what is expected of a corpus, and
            what was seen.
    """
    stem = os.path.basename(os.path.abspath(folder)) or "mine"
    path = Path(out or f"{stem}.gin")
    _check_out(path, folder)
    ask = Asking(yes)
    screen = prepare.console()
    layout = _with_splits(look(folder), folder, ask)
    layout, counted = _counted(layout, folder, ask)
    languages = _languages(layout, folder, counted)
    left_out = sorted({*counted.sizes} - {*languages})
    counted = dataclasses.replace(
        counted, sampled={code: counted.sampled[code] for code in languages}
    )
    pairs = sum(counted.sizes[code]["train"] for code in languages)
    lengths, _ = counting.lengths(counted, choosing.vocabulary_size(pairs))
    made = _Made(path, f"runs/{path.stem}", folder, layout, counted, lengths, Machine.here())
    minutes = ask.number("minutes that the training may take", choosing.MINUTES)
    made.choose(languages, minutes)
    screen.print(_facts(made, left_out), highlight=False, markup=False)
    screen.print(_table(made))
    for line in _warnings(made):
        screen.print(line, style="yellow", markup=False)
    for line in ask.taken:
        screen.print(f"not asked: {line}", markup=False)
    made.write()
    screen.print(f"\nwrote {path}", markup=False, highlight=False)
    for what, command in writing.commands(str(path), made.model_dir, _trial(made)).items():
        screen.print(f"\n# {what}", markup=False, highlight=False)
        screen.print(command, markup=False, highlight=False, soft_wrap=True)
    return path


def _check_out(path: Path, folder: str) -> None:
    if path.exists():
        raise InputError(f"{path}: is there, and is never written over; --out=another.gin")
    if "://" not in folder and path.resolve().is_relative_to(Path(folder).resolve()):
        elsewhere = os.path.relpath(Path(folder).resolve().parent / path.name)
        raise InputError(f"--out={path}: nothing is written into {folder}; --out={elsewhere}")
    if not path.parent.is_dir():
        raise InputError(f"--out={path}: no folder {path.parent}")


def _with_splits(layout: FoundCorpus, folder: str, ask: Asking) -> FoundCorpus:
    """Where names do not say all splits: whether a hash of the English side may."""
    question = (
        f"{folder}: no {' or '.join(layout.hashed)} sentences in {layout.files}: take English "
        f"sentences by their hash ({layout.hashes})"
    )
    if layout.hashed and not ask.whether(question):
        missing = " and ".join(layout.hashed)
        named = " and ".join(f"gl.{split}.tsv" for split in layout.hashed)
        raise InputError(f"{folder}: expected {missing} sentences, as in {named}; saw none")
    return layout


def _counted(layout: FoundCorpus, folder: str, ask: Asking) -> tuple[FoundCorpus, Counted]:
    """The corpus, with English in the right column."""
    counted = _read(layout, folder)
    wrong = dict.fromkeys(code for code, _ in counted.columns.reversed())
    right = dict.fromkeys(code for code, _ in counted.columns.right())
    swapped = layout.swapped()
    if wrong and (swapped is None or right or 2 * len(wrong) < len(counted.sizes)):
        of = ", ".join([*wrong][:5]) + (", ..." if len(wrong) > 5 else "")
        raise InputError(
            f"{folder}: expected English on the same side of every pair"
            f"{f', as of {len(right)} languages' if right else ''}; saw it on the other side "
            f"of {of}: swap the columns there"
        )
    if swapped is None or right:
        return layout, counted
    if not wrong and ask.number(_which_is_english(layout), 1, most=2) == 1:
        return layout, counted
    return swapped, _read(swapped, folder)


def _which_is_english(layout: FoundCorpus) -> str:
    if "english_field" not in layout.settings:
        return "which column is English"
    fields = (layout.settings[f"{side}_field"] for side in ("english", "translation"))
    return "which field is English ({}: 1, {}: 2)".format(*fields)


def _read(layout: FoundCorpus, folder: str) -> Counted:
    source = layout.opened(folder)
    known = source.languages()
    languages = [code for code in known if not is_english(code)]
    english = [code for code in known if is_english(code)]
    english += sorted(file for file, reason in source.skipped if reason == ENGLISH_CATALOGUE)
    if len(languages) < 2:
        seen = f"{layout.files} with {', '.join(known) or 'no language with training pairs'}"
        raise InputError(f"{folder}: {EXPECTED}; saw {seen}")
    with ProgressBar("read", 100, "%") as bar:
        counted = counting.count(
            source,
            languages,
            lambda done, total, what: bar.update(round(100 * done / total), what),
        )
    return dataclasses.replace(counted, english=english)


def _languages(layout: FoundCorpus, folder: str, counted: Counted) -> list[str]:
    """Those with training, dev and test pairs, by falling size: baselines need all three."""
    whole = [code for code, sizes in counted.sizes.items() if all(sizes[s] for s in SPLITS)]
    if len(whole) < 2:
        seen = "; ".join(
            f"{code} {' '.join(f'{sizes[split]:,} {split}' for split in SPLITS)}"
            for code, sizes in list(counted.sizes.items())[:3]
        )
        raise InputError(
            f"{folder}: expected training, dev and test pairs of two languages or more in "
            f"{layout.files}; saw {seen}{', ...' if len(counted.sizes) > 3 else ''}"
            f"{f' (by hash, {layout.hashes})' if layout.hashes else ''}"
            f"{''.join(f'; {one}' for one in counted.bad[:3])}"
        )
    return sorted(whole, key=lambda code: (-counted.sizes[code]["train"], code))


class _Made:
    """What is written: the choice, its experiment, and what it will take."""

    choice: Choice
    experiment: Experiment
    estimate: Estimate

    def __init__(
        self,
        path: Path,
        model_dir: str,
        folder: str,
        layout: FoundCorpus,
        counted: Counted,
        lengths: dict[str, Lengths],
        machine: Machine,
    ) -> None:
        self.path, self.model_dir, self.folder, self.layout = path, model_dir, folder, layout
        self.counted, self.lengths, self.machine = counted, lengths, machine

    def choose(self, languages: Sequence[str], minutes: float) -> None:
        found = choosing.candidates(languages, self.counted, self.lengths, self.machine)
        self.choice, needed = choosing.chosen(found, self._experiment, minutes, self.machine)
        self.experiment = self._experiment(self.choice)
        self.estimate = choosing.estimate(self.experiment, self.counted, self.machine, needed)
        self.sizes = {code: self.counted.sizes[code]["train"] for code in languages}
        self.epochs = choosing.epochs(self.experiment, self.choice, self.sizes, self.lengths)

    def _experiment(self, choice: Choice) -> Experiment:
        """As the config makes it: what is written is read before it is there."""
        with tempfile.TemporaryDirectory(prefix="m4-new-") as folder:
            path = Path(folder) / self.path.name
            path.write_text(self._text(choice), encoding="utf-8")
            return config.load([path], allowed_modules=()).experiment()

    def _text(self, choice: Choice, expected: Estimate | None = None) -> str:
        sizes = {code: self.counted.sizes[code]["train"] for code in choice.languages}
        pairs = choosing.pairs_a_step(choice, sizes, self.lengths)
        return writing.gin_text(
            choice, self.layout, self.folder, self.model_dir, pairs, self._head(choice, expected)
        )

    def _head(self, choice: Choice, expected: Estimate | None) -> list[str]:
        today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        pairs = sum(self.counted.sizes[code]["train"] for code in choice.languages)
        head = [
            f"{len(choice.languages)} languages to and from English, {pairs:,} training pairs of",
            f"{self.folder}: written by m4 new, {today}.",
            "",
        ]
        for what, command in writing.commands(
            str(self.path), self.model_dir, choice.languages[:3]
        ).items():
            if "40 steps" not in what:
                head.append(f"  {command}   # {what}")
        if expected is not None:
            head += ["", f"Hardware: {self.machine.name}. Expected: {_time(expected)}."]
        if bad := self.counted.bad:
            head += ["", "Lines that are skipped:", *(f"  {line}" for line in bad[:_BAD_FILES])]
        return head

    def write(self) -> None:
        writing.write(self.path, self._text(self.choice, self.estimate))


def _trial(made: _Made) -> list[str]:
    """Three languages for a trial: a large, a middling and a small one; with test sets that count
    in means, where there are some."""
    least = made.choice.levels.min_test_sentences
    codes = [c for c in made.sizes if made.counted.sizes[c]["test"] >= least]
    codes = codes if len(codes) > 1 else [*made.sizes]
    return list(dict.fromkeys([codes[0], codes[len(codes) // 2], codes[-1]]))


def _time(estimate: Estimate) -> str:
    parts = (("training", estimate.training), ("bilingual baselines", estimate.baselines),
             ("translating", estimate.decoding))  # fmt: skip
    said = ", ".join(f"{name} {_minutes(minutes)}" for name, minutes in parts)
    return f"about {said}; {estimate.memory_bytes / 2**30:.1f} GiB of memory"


def _minutes(minutes: float) -> str:
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{max(1, round(minutes))} min"


def _facts(made: _Made, left_out: Sequence[str]) -> str:
    """What was guessed and chosen, a line each."""
    layout, choice, size = made.layout, made.choice, made.choice.size
    mean = sum(made.epochs[c] * made.sizes[c] for c in made.sizes) / sum(made.sizes.values())
    lines = [
        f"layout: {layout.name}, {layout.files}"
        + "".join(f", {k} = {v!r}" for k, v in layout.settings.items() if k != "files"),
        f"English: {layout.english_side}",
        f"languages: {len(choice.languages)}",
        f"lengths: {choice.length} pieces a side, of a vocabulary of {choice.vocabulary_size:,}",
        f"model: {made.estimate.parameters / 1e6:.1f} M parameters: width {size.width}, "
        f"{size.layers} + {size.layers} layers, {size.experts} experts, {size.dtype}",
        f"training: {choice.steps:,} steps of {choice.batch_size} rows, "
        f"{mean:.1f} epochs of the average pair",
        f"expected on {made.machine.name}: {_time(made.estimate)}",
    ]
    if layout.not_read:
        more = f" and {len(layout.not_read) - 5} more" if len(layout.not_read) > 5 else ""
        lines.insert(1, f"not read: {', '.join(layout.not_read[:5])}{more}")
    if english := made.counted.english:
        lines.insert(-4, f"left out, English on both sides: {', '.join(english)}")
    if left_out:
        lines.insert(-4, f"left out, without training, dev or test pairs: {', '.join(left_out)}")
    return "\n".join(lines)


_COLUMNS: dict[str, Callable[[_Made, str], str]] = {
    "train": lambda made, code: f"{made.sizes[code]:,}",
    "dev": lambda made, code: f"{made.counted.sizes[code]['dev']:,}",
    "test": lambda made, code: f"{made.counted.sizes[code]['test']:,}",
    "pieces\nmedian": lambda made, code: str(made.lengths[code].percentile(50)),
    "\n95%": lambda made, code: str(made.lengths[code].percentile(95)),
    "\nmax": lambda made, code: str(made.lengths[code].percentile(100)),
    "too\nlong": lambda made, code: _percent(made.lengths[code].too_long(made.choice.length)),
    "overlap": lambda made, code: _percent(made.counted.overlap(code)),
    "level": lambda made, code: made.choice.levels.of(made.sizes[code]),
    "epochs": lambda made, code: f"{made.epochs[code]:.1f}",
}


def _table(made: _Made) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nlanguage", no_wrap=True)
    for name in _COLUMNS:
        text = name == "level"
        table.add_column(name if "\n" in name else f"\n{name}", justify="left" if text else "right")
    for code in made.choice.languages:
        name = describe(code).name
        label = code if name == code else f"{code} {name}"
        table.add_row(label, *(cell(made, code) for cell in _COLUMNS.values()))
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share else ""


def _warnings(made: _Made) -> list[str]:
    lines = [str(line) for line in made.counted.bad[:_BAD_FILES]]
    if (more := len(made.counted.bad) - _BAD_FILES) > 0:
        lines.append(f"and {more} more: m4 data audit --gin_file={made.path} has all")
    for code in made.sizes:
        share = counting.share_of_scripts(code, made.counted.sampled[code])
        if share is not None and share < _LEAST_IN_SCRIPT:
            lines.append(
                f"{code}: {share:.0%} of the letters are of the scripts of {describe(code).name}: "
                "is it another language?"
            )
    if few := sum(one < 1 for one in made.epochs.values()):
        lines.append(f"in {made.choice.steps:,} steps not every pair of {few} languages is seen")
    if often := [code for code, times in made.epochs.items() if times > _OFTEN]:
        more = f" and {len(often) - 5} more" if len(often) > 5 else ""
        # Languages that are all repeated are not repeated for others' sake.
        remedy = "a lower TEMPERATURE repeats" if len(often) < len(made.epochs) else ""
        lines.append(
            f"seen more than {_OFTEN} times: {', '.join(often[-5:])}{more}; "
            f"{remedy or 'fewer TRAIN_STEPS repeat'} less"
        )
    return lines
