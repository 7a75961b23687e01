"""Looks at a folder of sentence pairs and writes a complete gin file for it, for `m4 new`."""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
from rich.markup import escape
from rich.prompt import Confirm, IntPrompt, PromptBase
from rich.table import Table

from m4.data.cleaning.clean import DEFAULT, Cleaner
from m4.data.cleaning.english_side import SWAPPED, EnglishSides
from m4.data.directions import SIDES, base_pair, is_held_out, key_of, languages_of, split_direction
from m4.data.languages import is_english, title_of
from m4.data.sources import SPLITS, Pair
from m4.data.sources.detect import EXPECTED, Detected, detect
from m4.data.sources.gettext import ENGLISH_CATALOGUE
from m4.data.sources.reading.layout import named
from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.vocabulary import Vocabulary, least_size
from m4.jobs import continued_config, streams
from m4.parallel.platform.hardware import available_cpus
from m4.progress import ProgressBar
from m4.settings import InputError, check_name, counted, pasted

_TEMPLATE = Path(__file__).with_name("new.gin.template")
# Repeating text up to four times is nearly as good as new text (Muennighoff et al. 2023).
_EPOCHS, _MINUTES, _FEWEST_STEPS, _BASELINE_STEPS = 5, 60, 100, 6000
_LENGTHS, _BATCH_PIECES = (16, 24, 32, 48, 64, 96, 128, 192, 256), 3072
# Training pairs from which a vocabulary has so many pieces (docs/lab/2026-11-25-tatoeba.md).
_VOCABULARIES = {0: 3000, 50_000: 8000, 250_000: 16_000, 5_000_000: 32_000}
# FLOPs a second that the demo's training reaches on one core of a server (docs/performance.md). A
# constant, not a measurement, so that a corpus gets the same config on a busy machine.
_CORE_FLOPS = 4e10
# Pairs of a language that are tokenized, and lines or names that are shown.
_SAMPLE, _SHOWN = 1000, 20


class Size(NamedTuple):
    """Sizes of a model, and its peak learning rate, which is lower for wider models."""

    width: int
    layers: int
    rate: float


_SIZES, _BILINGUAL = (Size(256, 4, 4.9e-3), Size(128, 2, 7.0e-3)), Size(64, 2, 1.2e-2)


class Corpus(NamedTuple):
    """Summary of the text in a folder, by pair of languages."""

    sizes: dict[str, dict[str, int]]  # split -> pairs that cleaning leaves
    samples: dict[str, list[Pair]]  # training pairs at even distances
    english: Mapping[str, set[str]]  # the sides that are English, where the text tells
    wrong: Mapping[tuple[str, str], str]  # (pair, split) -> what is wrong with its languages
    notes: list[str]  # lines about files and languages that are left out


def write_config(
    folder: str, out: str | None, yes: bool, minutes: int | None = None, start: str | None = None
) -> None:
    """Writes the gin file of a corpus and prints the commands to paste."""
    screen = streams.console()
    stem = os.path.basename(os.path.abspath(folder)) or "mine"
    path = Path(out or f"{stem}.gin")
    second = path.with_name(f"{path.stem}_continued.gin")
    for file in (path, second) if start else (path,):
        _check_out(file, folder)
    begun = None if start is None else continued_config.opened(start)
    ask = _Questions(yes)
    layout = detect(folder)
    missing = f"{folder}: no {' or '.join(layout.by_hash)} sentences in {layout.files}"
    hashed = f"{missing}: take sentences by the hash of their first side ({layout.hash_rule})"
    if layout.by_hash and not ask.ask(Confirm, hashed, True):
        raise InputError(missing)
    layout, corpus = _with_english(layout, folder, ask)
    names = _whole_pairs(folder, layout, corpus)
    train = {pair: corpus.sizes[pair]["train"] for pair in names}
    languages, keys = languages_of(names), [*map(key_of, names)]
    pairs, cores = sum(train.values()), len(available_cpus())
    pieces = max(size for least, size in _VOCABULARIES.items() if pairs >= least)
    samples = {pair: corpus.samples[pair] for pair in names}
    lengths = _lengths(samples, pieces)
    if minutes is None:
        minutes = max(1, ask.ask(IntPrompt, "minutes of training", _MINUTES))
    values, *expected = _choose(train, lengths, pieces, minutes, cores)
    training, baselines = (counted(max(1, one), "minute") for one in expected)
    text = f"about {training} of training and {baselines} of bilingual baselines"
    text += f" on {counted(cores, 'CPU core')}"
    head = [f"pairs of languages: {len(names)}; training pairs: {pairs:,}", text]
    most = max(corpus.sizes[pair]["test"] for pair in names)
    centric = all(pair.startswith("en-") for pair in names)
    values |= {
        "shares": "{'en-*': 0.6}  # many languages to write, into English one" if centric else "{}"
    }
    values |= {"beams": 4, "test_sentences": 1000 if most > 1000 else None}
    length, decoding = values["length"], {}
    if begun is not None:
        length = _row_length(_piece_lengths(samples, begun.vocabulary))
        decoding = begun.decoding if begun.languages else {}
    values |= {name: decoding[name] for name in ("beams", "test_sentences") if name in decoding}
    for name in ("max_source_length", "max_target_length"):  # one search for all that is compared
        values[name] = max(values["length"], length, decoding.get(name, 0))
    values |= {"model_dir": repr(f"runs/{path.stem}"), "folder": repr(folder)}
    source = _source_lines(layout)
    with path.open("x", encoding="utf-8") as file:
        more = {"head": "\n".join(f"# {line}" for line in head), "source": "\n".join(source)}
        more |= {"languages": continued_config.listed(keys), "module": layout.module}
        file.write(Template(_TEMPLATE.read_text("utf-8")).substitute(values, **more))
    if begun is not None:
        own = {"length": length, "batch_size": _rows(length)}
        own |= {"model_dir": repr(f"runs/{second.stem}")}
        with second.open("x", encoding="utf-8") as file:
            file.write(continued_config.text(begun, values | own, keys, source, layout.module))
    for line in (
        f"layout: {layout.name}, {layout.files}",
        *([f"English: {layout.english_side()}"] if "en" in languages else []),
        f"languages: {len(languages)}; pairs of them: {len(names)}",
        "model: width {width}, {layers} + {layers} layers, 8 experts".format(**values),
        f"training: {values['steps']:,} steps of {values['batch_size']} rows",
        f"expected: {text}",
        *ask.taken,
    ):
        screen.print(line, highlight=False)
    screen.print(_table(names, corpus, lengths, values["length"]))
    left_out = [key_of(name) for name in corpus.sizes if name not in names]
    notes = [f"left out, without dev or test pairs: {named(left_out)}"] if left_out else []
    for line in [*notes, *corpus.notes[:_SHOWN]]:
        screen.print(line, style="yellow", highlight=False)
    screen.print(f"\nwrote {path}{f' and {second}' if begun else ''}", highlight=False)
    commands = _commands(str(path), f"runs/{path.stem}", keys)
    if begun is not None:
        commands |= _continued_commands(begun, values, second, f"runs/{path.stem}")
    for what, words in commands.items():
        screen.print(f"\n# {what}", highlight=False)
        screen.print(pasted(*words), highlight=False, soft_wrap=True)


class _Questions:
    """Asks questions on the terminal; `taken` notes the defaults taken without asking."""

    def __init__(self, yes: bool) -> None:
        self._yes = yes
        self.taken: list[str] = []

    def ask(self, kind: type[PromptBase[Any]], question: str, default: Any, **more: Any) -> Any:
        """Returns the answer to a question of this kind."""
        if self._yes:
            self.taken.append(f"assumed: {question}: {default}")
            return default
        try:
            return kind.ask(escape(question), default=default, **more)
        except EOFError as error:
            raise InputError(f"{question}? no answer; --yes takes the defaults") from error


def _check_out(path: Path, folder: str) -> None:
    check_name(folder)
    check_name(str(path))
    if path.exists():
        raise InputError(f"{path}: is there, and is never written over; --out=another.gin")
    if "://" not in folder and path.resolve().is_relative_to(Path(folder).resolve()):
        elsewhere = os.path.relpath(Path(folder).resolve().parent / path.name)
        raise InputError(f"--out={path}: nothing is written into {folder}; --out={elsewhere}")
    if not path.parent.is_dir():
        raise InputError(f"--out={path}: no folder {path.parent}")


def _with_english(layout: Detected, folder: str, ask: _Questions) -> tuple[Detected, Corpus]:
    """Reads the corpus with English on the right side, and asks where nothing tells the side."""
    corpus, swapped = _read(layout, folder), layout.swapped()
    right = {pair for pair, sides in corpus.english.items() if SIDES[0] in sides}
    wrong = {pair for (pair, _), said in corpus.wrong.items() if said == SWAPPED}
    for (pair, _), said in sorted(corpus.wrong.items()):
        if said != SWAPPED:
            raise InputError(f"{folder}: {key_of(pair)}: {said}")
    if wrong and (swapped is None or right or 2 * len(wrong) < len(corpus.sizes)):
        raise InputError(
            f"{folder}: expected English on the same side of every pair; saw it on the other side "
            f"of {named(sorted(map(key_of, wrong)))}: swap the columns there"
        )
    if swapped is None or right or not any(pair.startswith("en-") for pair in corpus.sizes):
        return layout, corpus
    question = f"is English in {layout.english_side()} (1) or in {swapped.english_side()} (2)"
    if not wrong and ask.ask(IntPrompt, question, 1, choices=["1", "2"]) == 1:
        return layout, corpus
    return swapped, _read(swapped, folder)


def _read(layout: Detected, folder: str) -> Corpus:
    """Reads and cleans the corpus once, without keeping it."""
    source = layout.opened(folder)
    known = source.language_pairs()
    variants = [pair for pair in known if all(map(is_english, split_direction(pair)))]
    pairs = [pair for pair in known if pair not in variants]
    if not pairs:
        there = ", ".join(map(key_of, known)) or "no language with training pairs"
        raise InputError(f"{folder}: {EXPECTED}; saw {layout.files} with {there}")
    sizes: dict[str, dict[str, int]] = {pair: dict.fromkeys(SPLITS, 0) for pair in pairs}
    samples: dict[str, list[Pair]] = {}
    english: dict[str, set[str]] = {}
    sides = EnglishSides()
    parts = [(split, pair) for split in reversed(SPLITS) for pair in pairs]
    with tempfile.TemporaryDirectory(prefix="m4-new-") as spool, ProgressBar("read", 100) as bar:
        cleaner = Cleaner(DEFAULT, source, pairs, Path(spool), on_read=sides.add)
        for done, (split, pair) in enumerate(parts):
            bar.update(round(100 * done / len(parts)), f"{split} {key_of(pair)}")
            sample, step = [], 1
            for chunk in cleaner.pairs(pair, split):
                rows = range(-sizes[pair][split] % step, len(chunk), step)
                sample += [Pair(chunk.first[row], chunk.second[row]) for row in rows]
                sizes[pair][split] += len(chunk)
                while len(sample) >= 2 * _SAMPLE:
                    sample, step = sample[::2], 2 * step
            samples[pair] = sample  # in the end of the training pairs
            if (side := sides.english(pair, split)) is not None:
                english.setdefault(pair, set()).add(side)
        cleaner.finish()  # puts the source's counts of skipped lines together
    same = [*map(key_of, variants)]
    same += sorted(file for file, why in source.reading.skipped if why == ENGLISH_CATALOGUE)
    notes = [f"left out, English on both sides: {named(same)}"] if same else []
    notes += [
        f"{named([file])}: {lines:,} skipped: {why}{source.reading.tallies[file].where(why)}"
        for (file, why), lines in sorted(source.reading.skipped.items())
    ]
    return Corpus(sizes, samples, english, sides.found(), notes)


def _whole_pairs(folder: str, layout: Detected, corpus: Corpus) -> list[str]:
    """Returns the pairs that have all splits, and their other text, the largest first."""
    whole = [pair for pair, sizes in corpus.sizes.items() if all(sizes.values())]
    whole += [pair for pair, sizes in corpus.sizes.items()
              if sizes["train"] and base_pair(pair) in whole and pair not in whole]  # fmt: skip
    if not whole:
        seen = [
            f"{key_of(pair)} {' '.join(f'{pairs:,} {split}' for split, pairs in sizes.items())}"
            for pair, sizes in [*corpus.sizes.items()][:3]
        ]
        raise InputError(
            f"{folder}: expected training, dev and test pairs of a language in {layout.files}; "
            f"saw {'; '.join([*seen, *corpus.notes[:3]])}"
        )
    return sorted(whole, key=lambda pair: (-corpus.sizes[pair]["train"], key_of(pair)))


def _lengths(samples: Mapping[str, Sequence[Pair]], pieces: int) -> dict[str, np.ndarray]:
    """Returns `_piece_lengths` by a vocabulary that is trained on the samples."""
    texts = [text for pairs in samples.values() for pair in pairs for text in pair]
    tags = languages_of(samples)
    with tempfile.TemporaryDirectory(prefix="m4-new-") as folder:
        path = Path(folder) / "vocabulary.model"
        few = texts[:: max(1, len(texts) // 40_000)]
        vocabulary.train(path, few, max(pieces, least_size(len(tags))), tags)
        return _piece_lengths(samples, Vocabulary(path))


def _piece_lengths(
    samples: Mapping[str, Sequence[Pair]], vocabulary: Vocabulary
) -> dict[str, np.ndarray]:
    """Returns language -> [2, n] pieces of both sides of its sample, with tag and eos."""
    found = {}
    for code, pairs in samples.items():
        sides = [vocabulary.encode([*side]) for side in zip(*pairs, strict=True)]
        found[code] = np.array([[len(ids) + 2 for ids in side] for side in sides])
    return found


def _row_length(lengths: Mapping[str, np.ndarray]) -> int:
    """Returns the length of a row that fits 95% of the pairs of nearly all languages."""
    longest = [np.percentile(sides.max(axis=0), 95) for sides in lengths.values()]
    fits = (length for length in _LENGTHS if length >= np.percentile(longest, 95))
    return next(fits, _LENGTHS[-1])


def _rows(length: int) -> int:
    return max(1, round(_BATCH_PIECES / (2 * length * 8))) * 8


def _choose(
    train: Mapping[str, int],
    lengths: Mapping[str, np.ndarray],
    pieces: int,
    minutes: float,
    cores: int,
) -> tuple[dict[str, Any], float, float]:
    """Returns values of the template, the minutes of training, and those of the baselines."""
    length = _row_length(lengths)
    rows = _rows(length)
    pairs = sum(train.values())
    mean = sum(size * lengths[code].mean() for code, size in train.items()) / pairs
    pairs_a_step = 0.9 * rows * length / mean  # nine tenths of a packed row are filled
    wanted = max(_FEWEST_STEPS, math.ceil(2 * _EPOCHS * pairs / pairs_a_step))
    size, step, steps = _SIZES[-1], 0.0, 0  # the largest that sees the pairs often enough
    for size in _SIZES:
        step = _step_minutes(size, pieces, 2 * rows * length, cores)
        steps = max(_FEWEST_STEPS, min(wanted, int(minutes / step)))
        steps -= steps % 10 ** (len(str(steps)) - 2)  # two digits that count
        if steps > 0.6 * wanted:
            break
    values = {
        "length": length,
        "vocabulary_size": pieces,
        "bilingual_vocabulary_size": pieces // 2,
        "steps": steps,
        "batch_size": rows,
        "pairs": round(pairs_a_step),
        "rate": f"{size.rate:.1e}",
        "width": size.width,
        "mlp_width": 4 * size.width,
        "heads": size.width // 32,
        "layers": size.layers,
        "baseline_steps": _BASELINE_STEPS,
        "dev_period": max(20, min(500, steps // 4)),
        "warmup": max(10, min(200, steps // 5)),
    }
    # By experience dev chrF ends a bilingual model after half of its steps.
    baseline = _BASELINE_STEPS / 2 * _step_minutes(_BILINGUAL, pieces // 2, 16 * length, cores)
    return values, steps * step, len(train) * baseline


def _step_minutes(size: Size, pieces: int, tokens: int, cores: int) -> float:
    """Returns the minutes of a training step: six FLOPs for each weight that a token meets."""
    # Attention, feed-forward, and a second expert in every other layer.
    weights = 18 * size.width**2 * size.layers + size.width * pieces
    return 6 * tokens * weights / (_CORE_FLOPS * cores) / 60


def _source_lines(layout: Detected) -> list[str]:
    """Returns the lines of the source, the corpus's source first."""
    settings = {"on_bad_line": "skip", **layout.settings}
    lines = [f"corpus.CorpusSpec.source = @{layout.name}", f"{layout.name}.folder = %TEXT_DIR"]
    return [*lines, *(f"{layout.name}.{name} = {v!r}" for name, v in settings.items())]


def _table(
    pairs: Sequence[str], corpus: Corpus, lengths: Mapping[str, np.ndarray], length: int
) -> Table:
    table = Table("languages", box=None)
    for title in (*SPLITS, f"pieces of 95%, of {length}", "too long"):
        table.add_column(title, justify="right")
    for pair in pairs:
        code, longer = key_of(pair), lengths[pair].max(axis=0)
        name = title_of(code)
        table.add_row(
            code if name == code else f"{code} {name}",
            *(f"{corpus.sizes[pair][split]:,}" for split in SPLITS),
            f"{np.percentile(longer, 95):.0f}",
            f"{(longer > length).mean():.1%}",
        )
    return table


def _commands(out: str, model_dir: str, languages: Sequence[str]) -> dict[str, list[str]]:
    """Returns purpose -> words of the command to paste."""
    tested = [*filter(is_held_out, languages)]
    some = dict.fromkeys([tested[0], tested[len(tested) // 2], tested[-1]])
    listed = "[" + ", ".join(f'"{code}"' for code in some) + "]"
    config = f"--gin_file={out}"
    short = ["--gin.TRAIN_STEPS=40", "--gin.BASELINE_STEPS=40", "--gin.TEST_SENTENCES=50"]
    trial = ["demo", config, f"--model_dir={model_dir}_trial", *short, f"--gin.LANGUAGES={listed}"]
    return {
        "how often each language would be seen": ["data", "preview", config],
        f"a trial of 40 steps (languages: {len(some)})": trial,
        "the full run; the same command resumes it": ["demo", config],
    }


def _continued_commands(
    start: continued_config.Start, values: Mapping[str, Any], config: Path, shared: str
) -> dict[str, list[str]]:
    """Returns purpose -> words of the commands for the continued model, and for the comparison."""
    run = f"runs/{config.stem}"
    found = {}
    if start.languages:
        longer = ("max_source_length", "max_target_length")
        found["translations of the old model, to see what is forgotten"] = [
            "decode", f"--model_dir={start.folder}",
            *(f"--gin.experiment.Decoding.{name}={values[name]}" for name in longer
              if values[name] != start.decoding.get(name))]  # fmt: skip
    return found | {
        f"continue from {start.folder}": ["train", f"--gin_file={config}"],
        "its translations": ["eval", f"--model_dir={run}"],
        "which start is the best": [
            "report", f"shared={shared}", f"continued={run}", f"--baseline={shared}",
            f"--output={run}_report"],
    }  # fmt: skip
