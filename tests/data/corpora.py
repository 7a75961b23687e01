"""One small corpus in every format that a source reads."""

import bz2
import functools
import gzip
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pyarrow as pa
import pyarrow.parquet as parquet
import zstandard
from etils import epath

from m4.data.directions import key_of
from m4.data.sources import SPLITS, Pair, Source
from m4.data.sources.aligned import Aligned
from m4.data.sources.gettext import Gettext
from m4.data.sources.huggingface import HuggingFace
from m4.data.sources.jsonl import Jsonl
from m4.data.sources.moses import Moses
from m4.data.sources.reading.files import unpacked
from m4.data.sources.tfds import Tfds
from m4.data.sources.tmx import Tmx
from m4.data.sources.tsv import Tsv

# Language -> split -> pairs.
Texts = dict[str, dict[str, list[Pair]]]
# Splits as TFDS and Hugging Face call them.
NAMES = {"train": "train", "dev": "validation", "test": "test"}


def texts_of(source: Source) -> Texts:
    return {
        key_of(pair): {split: list(source.pairs(pair, split)) for split in SPLITS}
        for pair in source.language_pairs()
    }


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": functools.partial(gzip.compress, mtime=0),
    ".zst": lambda content: zstandard.ZstdCompressor().compress(content),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


def write(path: Path, text: str) -> None:
    """Writes a file, compressed if its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pack = PACK.get(path.suffix, bytes)
    path.write_bytes(pack(text.encode()))


def parts(texts: Texts) -> Iterator[tuple[str, str, list[Pair]]]:
    for code, splits in texts.items():
        for split, pairs in splits.items():
            yield code, split, pairs


def write_files(
    folder: Path,
    name: str,
    texts: Texts,
    english: str = "en",
    words: Mapping[str, str] | None = None,
) -> Path:
    """Writes a file for each language and split, or two where the name has {side}.

    Args:
        name: Of the files, with {lang}, {split}, {side} and {place}, which is src or trg.
        words: Split -> its word in names. Defaults to the split.
    """
    for code, split, pairs in parts(texts):
        named = {"lang": code, "split": (words or {}).get(split, split)}
        kind = unpacked(name).rpartition(".")[2]
        if kind in FORMATS:
            write(folder / name.format(**named), FORMATS[kind](english, code, pairs))
            continue
        columns = zip((english, code), ("src", "trg"), zip(*pairs, strict=True), strict=True)
        for side, place, lines in columns:
            path = folder / name.format(**named, side=side, place=place)
            write(path, "".join(f"{line}\n" for line in lines))
    return folder


def json_lines(rows: Iterable[object]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def tmx_of(first: str, second: str, pairs: list[Pair]) -> str:
    """Returns a file as OPUS publishes it; a pair has four lines, from the sixth one on."""
    units = (
        f'    <tu>\n      <tuv xml:lang="{first}"><seg>{escape(a)}</seg></tuv>\n'
        f'      <tuv xml:lang="{second}"><seg>{escape(b)}</seg></tuv>\n    </tu>\n'
        for a, b in pairs
    )
    head = (
        f'<?xml version="1.0" encoding="UTF-8" ?>\n<tmx version="1.4">\n<header srclang="{first}"'
    )
    return f'{head}\n  datatype="PlainText" />\n  <body>\n{"".join(units)}  </body>\n</tmx>\n'


def po_of(first: str, second: str, pairs: list[Pair]) -> str:
    entries = ['msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n']
    for sides in pairs:
        quoted = (json.dumps(side, ensure_ascii=False) for side in sides)  # the same escapes
        entries.append("msgid {}\nmsgstr {}\n".format(*quoted))
    return "\n".join(entries)


# End of a file's name -> (code of one side, of the other, pairs) -> its text.
FORMATS: dict[str, Callable[[str, str, list[Pair]], str]] = {
    "tsv": lambda first, second, pairs: "".join(f"{a}\t{b}\n" for a, b in pairs),
    "jsonl": lambda first, second, pairs: json_lines(
        {"translation": {first: a, second: b}} for a, b in pairs
    ),
    "tmx": tmx_of,
    "po": po_of,
}


def joined(texts: Texts) -> Texts:
    """Returns the pairs of all splits in one."""
    return {code: {"train": [*chain(*splits.values())]} for code, splits in texts.items()}


def moses(folder: Path, texts: Texts) -> Source:
    for code in texts:
        pair = f"en-{code}" if code < "k" else f"{code}-en"
        write_files(folder, f"{{split}}.{pair}.{{side}}.zst", {code: texts[code]})
    return Moses(folder)


def jsonl(folder: Path, texts: Texts) -> Source:
    for split in SPLITS:
        rows = ({"lang": code, "source": first, "target": second}
                for code in texts for first, second in texts[code][split])  # fmt: skip
        write(folder / f"{split}.jsonl", json_lines(rows))
    return Jsonl(**arguments_of("jsonl", folder))


def huggingface(folder: Path, texts: Texts) -> Source:
    for code, split, pairs in parts(texts):
        name = f"{NAMES[split]}-00000-of-00001.parquet"
        (folder / f"en-{code}").mkdir(parents=True, exist_ok=True)
        parquet.write_table(translation_table(code, pairs), folder / f"en-{code}" / name)
    return HuggingFace(folder)


def translation_table(code: str, pairs: list[Pair]) -> pa.Table:
    """Returns a table like Hugging Face's feature Translation."""
    rows = [{"en": pair.first, code: pair.second} for pair in pairs]
    kind = pa.struct([("en", pa.string()), (code, pa.string())])
    return pa.table({"id": range(len(rows)), "translation": pa.array(rows, kind)})


def tfds(folder: Path, texts: Texts) -> Source:
    for code in texts:
        examples = {
            NAMES[split]: [{"en": pair.first, code: pair.second} for pair in pairs]
            for split, pairs in texts[code].items()
        }
        prepare_tfds(folder, f"en-{code}", ["en", code], examples)
    return Tfds([f"made_dataset/en-{code}" for code in texts], folder)


def prepare_tfds(
    folder: Path,
    config: str,
    languages: list[str] | None,
    examples: dict[str, list[dict[str, Any]]],
    version: str = "1.0.0",
) -> None:
    """Prepares made_dataset/<config>; without `languages` each example has its own."""
    folder.mkdir(exist_ok=True)
    _builder()(folder, config, languages, examples, version).download_and_prepare()


@functools.cache
def _builder() -> Callable[..., Any]:
    import tensorflow_datasets as tfds

    class MadeDataset(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        code_path = None  # looking for it needs a package that TFDS does not ask for

        def __init__(self, folder, config, languages, examples, version):  # type: ignore
            self._languages, self._examples = languages, examples
            super().__init__(
                data_dir=folder, config=tfds.core.BuilderConfig(name=config, version=version)
            )

        def _info(self) -> Any:
            features: Any = tfds.features
            if self._languages is not None:
                features = features.Translation(self._languages)
            else:
                variable = features.TranslationVariableLanguages()
                features = features.FeaturesDict({"translations": variable, "id": features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: Any) -> Any:
            return {split: self._generate_examples(split) for split in self._examples}

        def _generate_examples(self, split: str) -> Any:
            for number, example in enumerate(self._examples[split]):
                variable = {"translations": example, "id": f"talk {number}"}
                yield number, variable if self._languages is None else example

    return MadeDataset


# Module of m4/data/sources -> what writes a corpus and opens it.
WRITERS: dict[str, Callable[[Path, Texts], Source]] = {
    "tsv": lambda folder, texts: Tsv(write_files(folder, "{lang}.{split}.tsv.gz", texts)),
    "moses": moses,
    "aligned": lambda folder, texts: Aligned(
        **arguments_of("aligned", write_files(folder, "{split}/{lang}.{side}.xz", texts))
    ),
    "tmx": lambda folder, texts: Tmx(write_files(folder, "en-{lang}.{split}.tmx.gz", texts)),
    "jsonl": jsonl,
    "huggingface": huggingface,
    "gettext": lambda folder, texts: Gettext(
        **arguments_of("gettext", write_files(folder, "{lang}.po", joined(texts)))
    ),
    "tfds": tfds,
}


def arguments_of(name: str, folder: epath.Path | Path) -> dict[str, Any]:
    """Returns the arguments with which a corpus is opened in another folder."""
    return {
        "aligned": {"folder": folder, "files": "{split}/*.{lang}"},
        "jsonl": {"folder": folder, "files": "{split}.jsonl", "english_field": "source",
                  "translation_field": "target", "language_field": "lang"},
        "gettext": {"folder": folder, "dev_every": 6, "test_every": 4},
        "tfds": {"datasets": ["made_dataset/en-gl", "made_dataset/en-pt"], "data_dir": folder},
    }.get(name, {"folder": folder})  # fmt: skip
