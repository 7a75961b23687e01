"""Looks at a folder of sentence pairs and writes a complete gin file for it, for `m4 new`.

With --start it writes a second one, which continues from a model on the same dev and test sets.
"""

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

from m4.data.cache.cache import Cache
from m4.data.cleaning.clean import DEFAULT, Cleaner
from m4.data.cleaning.english_side import SWAPPED, EnglishSides
from m4.data.directions import (
    SIDES,
    base_pair,
    is_held_out,
    key_of,
    languages_of,
    pair_of,
    split_direction,
)
from m4.data.languages import is_english
from m4.data.sources import SPLITS, Pair
from m4.data.sources.detect import EXPECTED, Detected, detect
from m4.data.sources.gettext import ENGLISH_CATALOGUE
from m4.data.sources.reading.folder import named
from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.vocabulary import Vocabulary, least_size
from m4.jobs import streams
from m4.jobs.checkpoints.pretrained import Beginning, beginning
from m4.parallel.platform.hardware import available_cpus
from m4.progress import ProgressBar
from m4.settings import InputError, check_name, counted, pasted
from m4.storage import run_folder
from m4.storage.local_copy import fetched

_HERE = Path(__file__).parent
_NEW, _CONTINUED = _HERE / "new.gin.template", _HERE / "continued.gin.template"
# Repeating text up to four times is nearly as good as new text (Muennighoff et al. 2023).
_EPOCHS, _MINUTES, _FEWEST_STEPS, _BASELINE_STEPS = 5, 60, 100, 6000
_LENGTHS, _BATCH_PIECES = (16, 24, 32, 48, 64, 96, 128, 192, 256), 3072
# Minimum training pairs -> pieces of the vocabulary (docs/lab/2026-11-25-tatoeba.md).
_VOCABULARIES = {0: 3000, 50_000: 8000, 250_000: 16_000, 5_000_000: 32_000}
# FLOPs a second that the demo's training reaches on one core of a server (docs/performance.md). A
# constant, not a measurement, so that a corpus gets the same config on a busy machine.
_CORE_FLOPS = 4e10
# Number of pairs per language to tokenize, and of notes to print.
_SAMPLE, _SHOWN = 1000, 20


# Width, layers and peak learning rate of models, the largest first; width and layers of baselines.
_SIZES, _BILINGUAL = ((256, 4, 1.1e-2), (128, 2, 1.6e-2)), (64, 2)


class Corpus(NamedTuple):
    """Summary of the text in a folder, by pair of languages."""

    sizes: dict[str, dict[str, int]]  # split -> pairs that cleaning leaves
    samples: dict[str, list[Pair]]  # pair -> training pairs, evenly spaced
    english: Mapping[str, set[str]]  # pair -> sides that are English, where the text tells
    wrong: Mapping[tuple[str, str], str]  # (pair, split) -> mistake in its languages
    notes: list[str]  # lines about left-out files and languages


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
    begun = None if start is None else opened(start)
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
    text = f"about {training} of training and {baselines} of bilingual baselines on "
    text += counted(cores, "CPU core")
    head = f"# pairs of languages: {len(names)}; training pairs: {pairs:,}\n# {text}"
    most = max(corpus.sizes[pair]["test"] for pair in names)
    centric = all(pair.startswith("en-") for pair in names)
    shares = "{'en-*': 0.6}  # many languages to write, into English one" if centric else "{}"
    values |= {"shares": shares, "beams": 4, "test_sentences": 1000 if most > 1000 else None}
    length, decoding = values["length"], {}
    if begun is not None:
        length = _row_length(_piece_lengths(samples, begun.vocabulary))
        decoding = begun.decoding if begun.languages else {}
    values |= {name: decoding[name] for name in ("beams", "test_sentences") if name in decoding}
    for name in ("max_source_length", "max_target_length"):  # all compared models search alike
        values[name] = max(values["length"], length, decoding.get(name, 0))
    values |= {"model_dir": repr(f"runs/{path.stem}"), "folder": repr(folder)}
    settings = {"on_bad_line": "skip", **layout.settings}
    source = [f"corpus.CorpusSpec.source = @{layout.name}", f"{layout.name}.folder = %TEXT_DIR",
              *(f"{layout.name}.{name} = {v!r}" for name, v in settings.items())]  # fmt: skip
    more = {"head": head, "source": "\n".join(source), "languages": listed(keys)}
    scratch = Template(_NEW.read_text("utf-8")).substitute(values, module=layout.module, **more)
    texts = {path: scratch}
    if begun is not None:
        own = {"length": length, "batch_size": _rows(length)}
        own |= {"model_dir": repr(f"runs/{second.stem}")}
        texts[second] = _continued(begun, values | own, keys, source, layout.module)
    for file, content in texts.items():
        with file.open("x", encoding="utf-8") as written:
            written.write(content)
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
    """Asks questions on the terminal; `taken` lists the defaults that it took without asking."""

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
    for name in (folder, str(path)):
        check_name(name)
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
    with tempfile.TemporaryDirectory(prefix="m4-") as spool, ProgressBar("read", 100, "%") as bar:
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
            samples[pair] = sample  # the last split is training
            if (side := sides.english(pair, split)) is not None:
                english.setdefault(pair, set()).add(side)
        cleaner.finish()  # gathers the source's counts of skipped lines
    same = [*map(key_of, variants)]
    same += sorted(file for file, why in source.reading.skipped if why == ENGLISH_CATALOGUE)
    notes = [f"left out, English on both sides: {named(same)}"] if same else []
    notes += [
        f"{named([file])}: {lines:,} skipped: {why}{source.reading.tallies[file].where(why)}"
        for (file, why), lines in sorted(source.reading.skipped.items())
    ]
    return Corpus(sizes, samples, english, sides.found(), notes)


def _whole_pairs(folder: str, layout: Detected, corpus: Corpus) -> list[str]:
    """Returns the pairs that have all splits, and those with more text of them, largest first."""
    whole = [pair for pair, sizes in corpus.sizes.items() if all(sizes.values())]
    whole += [pair for pair, sizes in corpus.sizes.items()
              if sizes["train"] and base_pair(pair) in whole and pair not in whole]  # fmt: skip
    if not any(map(is_held_out, whole)):
        seen = [f"{key_of(pair)} {' '.join(f'{pairs:,} {split}' for split, pairs in sizes.items())}"
                for pair, sizes in [*corpus.sizes.items()][:3]]  # fmt: skip
        raise InputError(
            f"{folder}: expected training, dev and test pairs of a language in {layout.files} "
            f"(text like gl~bt is never tested); saw {'; '.join([*seen, *corpus.notes[:3]])}"
        )
    return sorted(whole, key=lambda pair: (-corpus.sizes[pair]["train"], key_of(pair)))


def _lengths(samples: Mapping[str, Sequence[Pair]], pieces: int) -> dict[str, np.ndarray]:
    """Returns `_piece_lengths` with a vocabulary that is trained on the samples."""
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
    train: Mapping[str, int], lengths: Mapping[str, np.ndarray], pieces: int, minutes: float,
    cores: int,
) -> tuple[dict[str, Any], float, float]:  # fmt: skip
    """Returns values of the template, and the minutes of training and of the baselines."""
    length = _row_length(lengths)
    rows = _rows(length)
    pairs = sum(train.values())
    mean = sum(size * lengths[code].mean() for code, size in train.items()) / pairs
    pairs_a_step = 0.9 * rows * length / mean  # packing fills about nine tenths of a row
    wanted = max(_FEWEST_STEPS, math.ceil(2 * _EPOCHS * pairs / pairs_a_step))
    step, steps = 0.0, 0
    width, layers, rate = _SIZES[-1]
    for width, layers, rate in _SIZES:  # noqa: B007 - takes the largest that sees the pairs often enough
        step = _step_minutes(width, layers, pieces, 2 * rows * length, cores)
        steps = max(_FEWEST_STEPS, min(wanted, int(minutes / step)))
        steps -= steps % 10 ** (len(str(steps)) - 2)  # two significant digits
        if steps > 0.6 * wanted:
            break
    # From 2,000 steps on, narrower experts in every layer are better (results/frontier).
    every = 1 if steps >= 2000 else 2
    values = {
        "length": length, "vocabulary_size": pieces, "bilingual_vocabulary_size": pieces // 2,
        "steps": steps, "batch_size": rows, "pairs": round(pairs_a_step), "rate": f"{rate:.1e}",
        "width": width, "mlp_width": (2 + every) * width, "moe_every": every,
        "heads": width // 32, "layers": layers,
        "baseline_steps": _BASELINE_STEPS, "dev_period": max(20, min(500, steps // 4)),
        "warmup": max(10, min(200, steps // 5)),
    }  # fmt: skip
    # In experience, early stopping on dev chrF ends a bilingual model after half of its steps.
    baseline = _step_minutes(*_BILINGUAL, pieces // 2, 16 * length, cores)
    return values, steps * step, len(train) * _BASELINE_STEPS / 2 * baseline


def _step_minutes(width: int, layers: int, pieces: int, tokens: int, cores: int) -> float:
    """Returns the minutes of a training step: six FLOPs for each weight that a token meets."""
    # These are the weights of attention, feed-forward layers, second experts and logits.
    weights = 18 * width**2 * layers + width * pieces
    return 6 * tokens * weights / (_CORE_FLOPS * cores) / 60


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


# Dev sentences of all directions together that each evaluation translates greedily.
_DEV_SENTENCES = 1600
# Best rate for continuing models of m4 at width 128, with matrices at 4 times that: a seventh of
# what these had from scratch, which is also lower for wider models (results/starts).
_RATE = 1.0e-3
# Share of old text that gained most and forgot least in results/starts. It needed five times the
# steps of a share of 0.3, but fewer than training from scratch.
_KEEP_SHARE = 0.9


class Start(NamedTuple):
    """A model to continue from."""

    folder: Path  # a run of m4, or a model in Hugging Face's layout
    vocabulary: Vocabulary  # vocabulary of its sources
    corpus: Path | None  # the run's corpus, if it exists on this machine
    decoding: Mapping[str, Any]  # settings of the run's translations
    languages: Sequence[str]  # the corpus's tested languages, as in CorpusSpec.languages

    @property
    def run(self) -> bool:
        """True for a run of m4."""
        return (self.folder / "run.json").is_file()


def opened(place: str) -> Start:
    """Returns the model to continue from. Raises InputError if m4 cannot begin from it."""
    folder = fetched(place)
    vocabulary = beginning(folder).vocabulary
    if not (folder / "run.json").is_file():
        return Start(folder, vocabulary, None, {}, [])
    record = run_folder.read(folder)
    data_dir = record["config"].get("experiment.Data.data_dir", "None").strip("'\"")
    root = folder / "data" if data_dir == "None" else Path(data_dir)
    corpus = root / Cache(folder / run_folder.VOCABULARY).fingerprint
    if not (corpus / "manifest.json").is_file():
        return Start(folder, vocabulary, None, record["decoding"], [])
    cache = Cache(corpus)
    tested = [key_of(pair) for pair in cache.language_pairs()
              if cache.size(pair, "test") and is_held_out(pair)]  # fmt: skip
    return Start(folder, vocabulary, corpus, record["decoding"], tested)


def _continued(
    start: Start, values: Mapping[str, Any], languages: Sequence[str], source: Sequence[str],
    module: str,
) -> str:  # fmt: skip
    """Returns the text of the gin file that continues from a model."""
    codes = languages_of(map(pair_of, languages))
    begun = beginning(start.folder, [code for code in codes if code != "en"])
    kept = [code for code in start.languages if code not in languages]
    template = _CONTINUED.read_text("utf-8")
    imports = {*begun.imports, f"from m4.data.sources import {module}"} - {*template.splitlines()}
    if kept:
        first, *rest = source
        of = first.rpartition(" = ")[2]
        source = ["corpus.CorpusSpec.source = @joined.Joined", f"joined.Joined.source = {of}",
                  f"joined.Joined.corpus = {str(start.corpus)!r}", *rest,
                  "experiment.Data.keep = %KEEP",
                  "experiment.Data.keep_share = %KEEP_SHARE"]  # fmt: skip
        imports.add("from m4.data.sources import joined")
    directions = 2 * len(languages)
    optimizer = _optimizer(begun) if start.run else []
    imports |= {"from m4.train import average"} if optimizer else set()
    own = ("transformer.Transformer.dropout_rate", "experiment.Training.optimizer")
    settings = [line for line in begun.settings if not line.startswith(own[: 1 + start.run])]
    rate = _RATE * (128 / begun.width) ** 0.5 if start.run else 1e-3
    return Template(template).substitute(
        values,
        head="\n".join([f"# continues from {start.folder}", *begun.about]),
        imports="\n".join(sorted(imports)),
        languages=listed([*languages, *kept]),
        keep=f"KEEP = [  # what the model must not forget\n{listed(kept)}\n]\n"
        f"KEEP_SHARE = {_KEEP_SHARE}  # share of the draws; 0 only shows what is forgotten"
        if kept
        else "# experiment.Data.keep: old languages, to see what is forgotten (docs/initial.md)",
        source="\n".join(source),
        settings="\n".join(settings),
        steps=2 * values["steps"],
        dev_period=max(20, values["steps"] // 10),
        dev_pairs=max(20, min(200, _DEV_SENTENCES // directions)),
        rate=f"{rate:.1e}",
        why="from results/starts" if start.run else "T5's rate for fine-tuning",
        optimizer="\n".join(optimizer),
    )


def _optimizer(begun: Beginning) -> list[str]:
    """Returns the lines of m4's own optimizer, which a config from scratch also has."""
    lines = [
        "experiment.Training.optimizer = @average.averaged",
        "average.averaged.optimizer = @optimizer.muon",
        "optimizer.muon.schedule = @schedules.rsqrt",
        "optimizer.muon.matrix_rate = 4.0",
    ]
    if any(line.startswith("moe.MoeLayer.") for line in begun.settings):
        lines += ["experiment.Training.router_z_loss_factor = 1.0e-3"]
        lines += ["optimizer.muon.experts = True"]
    return lines


def listed(codes: Sequence[str]) -> str:
    """Returns lines of twelve codes each, for a list in gin."""
    rows = (codes[at : at + 12] for at in range(0, len(codes), 12))
    return "\n".join("    " + " ".join(f"{code!r}," for code in row) for row in rows)


def _continued_commands(
    start: Start, values: Mapping[str, Any], config: Path, shared: str
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
