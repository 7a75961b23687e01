"""`m4 checkpoint inspect|trim`: a gin file that begins from a model; a smaller vocabulary."""

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from m4.data.cache.cache import Cache
from m4.data.directions import base_language
from m4.data.preprocess import tag_symbol
from m4.data.sources.reading.lines import text_lines
from m4.data.vocabulary.pieces import trimmed, used_ids
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.jobs.checkpoints.initial import CONFIG, SourceHf, is_hf
from m4.model.transformer import Transformer
from m4.settings import InputError
from m4.storage import run_folder, safetensors
from m4.storage.files import check_tree, whole_folder, write_text
from m4.storage.local_copy import fetched
from m4.train import hf_layout

# Ids added behind a vocabulary's own, for tags and pieces of new languages.
_ROOM = 128
_LONGEST_LINE = 1 << 20  # bytes


def inspect(run: str, output: Path | None) -> str | None:
    """Returns or writes the gin file that begins from a model; returns None for a run unasked."""
    if not (is_hf(folder := fetched(run)) or output):
        return None
    found = beginning(folder)
    about = "\n".join(found.about)
    text = "\n".join([about, *found.imports, "", *found.settings])
    if output is None:
        return text
    check_new(output)
    write_text(output, text + "\n")
    return about


class Beginning(NamedTuple):
    """Content of a gin file that begins from a model."""

    about: list[str]  # comments that describe the model
    imports: list[str]
    settings: list[str]  # model, vocabulary, place and, if any, the model's own optimizer
    vocabulary: Vocabulary  # of sources
    width: int


def beginning(folder: Path, languages: Sequence[str] = ()) -> Beginning:
    """Returns the gin file that begins from a folder: a run of m4, or Hugging Face's layout."""
    if is_hf(folder):
        return _of_hf(SourceHf(folder), folder, languages)
    if (folder / "run.json").is_file() and (folder / run_folder.VOCABULARY).is_dir():
        return _of_run(folder, languages)
    raise InputError(
        f"{folder}: neither a trained run of m4 (run.json, vocabulary/) nor a model in Hugging "
        f"Face's layout ({CONFIG}, model.safetensors, spiece.model)"
    )


def _room(vocabulary: Vocabulary, languages: Sequence[str]) -> int:
    new = {*map(base_language, languages)} - {*vocabulary.languages}
    return _ROOM * max(1, len(new))


def _of_run(folder: Path, languages: Sequence[str]) -> Beginning:
    record, cache = run_folder.read(folder), Cache(folder / run_folder.VOCABULARY)
    known = [line for line in (folder / "operative_config.gin").read_text("utf-8").splitlines()
             if line.startswith(("from ", "import "))]  # fmt: skip
    of_model = {line.split()[-1] for line in known if line.startswith("from m4.model")}
    # Settings of bilingual baselines, which have scopes in front, are left out.
    others = tuple(f"{value.strip('@').rpartition('/')[0]}/" for name, value
                   in record["config"].items() if name.startswith("experiment.Baselines.")
                   and value.startswith("@"))  # fmt: skip
    settings = {name: value for name, value in record["config"].items()
                if name.rpartition("/")[2].split(".")[0] in of_model
                and not (others and name.startswith(others))}  # fmt: skip
    source, target = cache.source_vocabulary, cache.target_vocabulary
    room = _room(source, languages)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    lines += [f"corpus.CorpusSpec.vocabulary_from = {str(folder)!r}",
              f"corpus.CorpusSpec.vocabulary_size = {source.size + room}"]  # fmt: skip
    if cache.separate:
        lines += [f"corpus.CorpusSpec.target_vocabulary_size = {target.size + room}"]
    for name in ("corpus.CorpusSpec.mixture", "experiment.Experiment.vocabulary_multiple"):
        if name in record["config"]:
            lines.append(f"{name} = {record['config'][name]}")
    lines.append(f"INITIAL_CHECKPOINT_PATH = {str(folder)!r}")
    used = {word for line in lines for word in re.findall(r"(?:^|[@/])(\w+)\.", line)}
    imports = [line for line in known if line.split()[-1] in used]
    tags = source.languages
    about = [
        f"# {folder}: a run of m4 with {len(cache.languages())} languages",
        f"# vocabulary: {source.size:,} pieces"
        + (f" of sources, {target.size:,} of targets" if cache.separate else ""),
        f"# tags: {len(tags)} ({' '.join(tags)}); others come behind",
    ]
    width = int(settings.get("transformer.Transformer.width", 0)) or Transformer.width
    return Beginning(about, sorted(imports), lines, source, width)


def _of_hf(there: SourceHf, folder: Path, languages: Sequence[str]) -> Beginning:
    vocabulary, weights, settings = there.vocabulary(), there.weights, there.settings
    numbers = sum(math.prod(shape) for shape in there.shapes.values())
    files = {*weights.files.values()}
    size = sum(path.stat().st_size for path in files)
    pad, eos, start = there.ids
    changed = "" if vocabulary.old_ids[:3] == [0, 1, 2] and pad == start else " -> 0, 1 and 0 in m4"
    tags, pieces = vocabulary.languages, vocabulary.size
    about = [
        f"# {folder}: {there.family.architecture}, {numbers:,} parameters",
        f"# {len(files)} file(s), {size / 1e6:,.1f} MB, {', '.join(sorted(weights.dtypes))}",
        f"# {vocabulary.path.name}: {pieces:,} pieces for {settings['vocab_size']:,} rows, "
        f"{'with' if vocabulary.byte_ids else 'no'} bytes",
        f"# ids: pad {pad}, eos {eos}, start {start}{changed}",
        f"# tags: {len(tags)}{' (' + ' '.join(tags) + ')' if tags else ''}; others come behind",
        "# computed as there: m4 begins with the same logits of the old pieces",
    ]
    imports = ["from m4 import experiment", "from m4.data import corpus"]
    if there.experts is not None:
        imports += ["from m4.model import moe", "from m4.model.gates import switch"]
    imports += ["from m4.model import transformer", "from m4.train import initial"]
    imports += ["from m4.train import optimizer", "from m4.train import schedules"]
    lines = [f"transformer.Transformer.{name} = {value!r}" for name, value in settings.items()
             if name not in ("vocab_size", "source_vocab_size")]  # fmt: skip
    if there.experts is None:
        lines += ["transformer.Transformer.moe = None  # @moe.MoeLayer: experts are copies"]
    else:
        lines += [
            "transformer.Transformer.moe = @moe.MoeLayer",
            f"transformer.Transformer.moe_every = {there.experts['moe_every']}",
            f"moe.MoeLayer.num_experts = {there.experts['num_experts']}",
            "moe.MoeLayer.gate = @switch.switch",
        ]
    rows = max(settings["vocab_size"], pieces + _room(vocabulary, languages))
    lines += [
        f"corpus.CorpusSpec.vocabulary_from = {str(folder)!r}",
        f"corpus.CorpusSpec.vocabulary_size = {rows}",
        *(["corpus.CorpusSpec.segmentations = 1"] if not vocabulary.has_merges else []),
        *(["initial.InitialModel.new_pieces = 'pieces'"] if not vocabulary.byte_ids else []),
        "experiment.Training.optimizer = @optimizer.adafactor  # T5's own",
        "optimizer.adafactor.schedule = @schedules.rsqrt",
        f"INITIAL_CHECKPOINT_PATH = {str(folder)!r}",
    ]
    return Beginning(about, imports, lines, vocabulary, settings["width"])


def trim(run: str, corpus: Path, output: Path) -> str:
    """Writes a model whose vocabulary has only the pieces of a corpus; returns its sizes as text.

    Specials, bytes, tags and the order of pieces stay. Logits are those of the old model without
    the dropped columns.
    """
    folder = fetched(run)
    there = SourceHf(folder)
    check_new(output)
    old = there.vocabulary()
    used, special = used_ids(old, _lines(corpus)), used_ids(old, [])
    if used == special:
        raise InputError(f"--corpus={corpus}: has none of the pieces of {old.path}")
    kept = sorted(old.old_ids[i] for i in used)
    rows = there.settings["vocab_size"]
    ids = dict(zip(hf_layout.IDS, (kept.index(i) for i in there.ids), strict=True))
    with whole_folder(output) as unfinished:
        (unfinished / old.path.name).write_bytes(trimmed(old, used))
        config = {**there.config, **ids, "vocab_size": len(kept)}
        write_config(unfinished, config, Vocabulary(unfinished / old.path.name))
        files = sorted({*there.weights.files.values()})
        for file in files:
            arrays = {}
            for name in (name for name, path in there.weights.files.items() if path == file):
                array = there.weights.read(name)
                cut = name in (*hf_layout.TABLES, "lm_head.weight")
                arrays[name] = array[kept] if cut else array
            safetensors.write(unfinished / file.name, arrays, {"format": "pt"})
        if (folder / safetensors.INDEX).is_file():
            shutil.copyfile(folder / safetensors.INDEX, unfinished / safetensors.INDEX)
    before, after = (sum((at / f.name).stat().st_size for f in files) for at in (folder, output))
    return (
        f"{output}: {rows:,} -> {len(kept):,} rows, {before / 1e6:,.1f} -> {after / 1e6:,.1f} MB "
        f"({after / before:.0%})"
    )


def check_new(output: Path) -> None:
    """Raises InputError if the output exists already."""
    if output.exists():
        raise InputError(f"--output={output}: is there already")


def write_config(folder: Path, config: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Writes config.json, with the ids of the vocabulary file, and the tokenizer's config."""
    pad, eos, unk = vocabulary.special_pieces
    tokenizer = {
        "tokenizer_class": "T5Tokenizer", "pad_token": pad, "eos_token": eos, "unk_token": unk,
        "additional_special_tokens": [tag_symbol(language) for language in vocabulary.languages],
        "extra_ids": 0, "legacy": False,
    }  # fmt: skip
    ids = {name: config[name] for name in hf_layout.IDS}
    files = {CONFIG: config, "generation_config.json": ids, "tokenizer_config.json": tokenizer}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _lines(corpus: Path) -> Iterator[str]:
    """Yields the texts of all files by line, split at tabs."""
    if corpus.is_dir():
        check_tree(corpus)
    files = sorted(path for path in corpus.rglob("*") if path.is_file())
    if corpus.is_file():
        files = [corpus]
    if not files:
        raise InputError(f"--corpus={corpus}: must be a text file, or a folder of such")
    for path in files:
        for line in text_lines(epath.Path(path), _LONGEST_LINE):
            yield from line.split("\t")
