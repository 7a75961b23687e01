"""Reading of TensorFlow Datasets prepared by `tfds build`; nothing is downloaded."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from etils import epath

from m4.data.directions import pair_of
from m4.data.sources import SPLITS, Pair
from m4.data.sources.reading.files import digest, folder_at
from m4.data.sources.reading.folder import Codes, Every, Spool
from m4.data.sources.reading.lines import Reading, Reason, Tally
from m4.data.splits import HashSplit
from m4.settings import InputError, OneOf, SettingError, checked
from m4.storage.files import read_json

_BATCH = 1024
_OWN = "tensorflow_datasets."  # packages whose features are read


@checked
@dataclass(eq=False)
class Tfds:
    """Sentence pairs of prepared datasets: opus, wmt*, flores, ted_hrlr, ted_multi ...

    A dataset has a feature `Translation` (a language pair, or several languages of which one is
    English) or `TranslationVariableLanguages` (like ted_multi: it is read once and its pairs are
    sorted by language on disk). Several datasets with one language follow each other.

    Attributes:
        datasets: 'name/config' or 'name/config:version' (default: the newest), as for `tfds build`.
        data_dir: Folder of datasets. Defaults to TFDS_DATA_DIR, otherwise ~/tensorflow_datasets.
        splits: Split -> TFDS's, which may be a part ('train[:90%]'). Defaults to train, validation
            and test; with dev_every and test_every to train, split by a hash of the English.
        english, codes, dev_every, test_every, on_bad_line: See the settings of other folders, such
            as `tsv.Tsv`.
    """

    datasets: str | Sequence[str]
    data_dir: str | os.PathLike[str] | None = None
    splits: Mapping[str, str] | None = None
    english: str = "en"
    codes: Mapping[str, str] | None = None
    dev_every: Every = 0
    test_every: Every = 0
    on_bad_line: Annotated[str, OneOf(("fail", "skip"))] = "fail"

    def __post_init__(self) -> None:
        self.reading = Reading("Tfds", self.on_bad_line)
        self.hash_split = HashSplit("Tfds", self.dev_every, self.test_every)
        splits = self.splits
        if splits is None:
            splits = {"train": "train"}
            if not self.hash_split:
                splits |= {"dev": "validation", "test": "test"}
        known = {"train"} if self.hash_split else {*SPLITS}
        if not {"train"} <= {*splits} <= known:
            allowed = "of train (needed), dev and test; with dev_every and test_every of train"
            raise SettingError("Tfds.splits", splits, allowed)
        if not self.datasets:
            raise SettingError("Tfds.datasets", self.datasets, "at least one name")
        self._splits = dict(splits)
        self._codes = dict(self.codes or {})

    def language_pairs(self) -> list[str]:
        """Returns the pairs of all datasets, sorted; imports TensorFlow Datasets (seconds)."""
        found = {pair for dataset in self._datasets for pair in dataset.codes}
        return sorted(found.union(self._spool.language_pairs()))

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the pairs of a language with English, dataset by dataset, in file order."""
        assert split in SPLITS, split
        if (pair := pair_of(pair)) not in (there := self.language_pairs()):
            said = f"no {pair} in {', '.join(self._folders)}; there is {', '.join(there)}"
            raise InputError(f"{self._data_dir}: {said} (Tfds.datasets, Tfds.codes)")
        origin = "train" if self.hash_split else split
        for dataset in self._datasets:
            if pair not in dataset.codes or origin not in self._splits:
                continue
            sides = dataset.pairs(self._splits[origin], dataset.codes[pair])
            with self._tally(dataset, origin) as tally:
                for number, (english, translation) in enumerate(sides, 1):
                    texts = tally.pair(number, _text(english), _text(translation))
                    if texts and (not self.hash_split or self.hash_split(texts.first) == split):
                        yield texts
        yield from self._spool.pairs(pair, split)

    def identity(self) -> dict:
        """Returns the settings, and sizes and SHA-256 of the files, without TensorFlow."""
        return {
            "source": "tfds",
            "splits": self._splits,
            "english": self.english,
            "codes": self._codes,
            **self.hash_split.identity(),
            **self.reading.identity(),
            "datasets": {
                f"{name.split(':')[0]}:{folder.name}": {
                    path.name: digest(path)
                    for path in sorted(folder.iterdir())
                    if not path.name.startswith(".") and not path.is_dir()
                }
                for name, folder in self._folders.items()
            },
        }

    def _version_folder(self, dataset: str) -> epath.Path:
        name, _, version = dataset.partition(":")
        folder = self._data_dir / name
        there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        versions = [name for name in there if re.fullmatch(r"\d+\.\d+\.\d+", name)]
        if version in versions:
            return folder / version
        if version or not versions:
            said = f"no prepared dataset{version and f' of version {version}'}, "
            said += f"{', '.join(sorted(there)) or 'nothing'} is there"
            remedy = f"`tfds build {dataset} --data_dir={self._data_dir}` makes it"
            raise InputError(f"{folder}: {said}; {remedy} (Tfds.datasets)")
        return folder / max(versions, key=lambda text: [int(part) for part in text.split(".")])

    @cached_property
    def _data_dir(self) -> epath.Path:
        default = os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")
        return folder_at(self.data_dir or default, "Tfds.data_dir")

    @cached_property
    def _folders(self) -> dict[str, epath.Path]:
        names = [self.datasets] if isinstance(self.datasets, str) else self.datasets
        return {name: self._version_folder(name) for name in names}

    @cached_property
    def _datasets(self) -> list[_Dataset]:
        splits = self._splits.values()
        found = [_Dataset(*named, self.english, splits) for named in self._folders.items()]
        for dataset in found:
            codes = (code for code in dataset.languages or () if code != self.english)
            dataset.codes = {pair_of(self._m4(code, dataset.folder)): code for code in codes}
        return found

    @cached_property
    def _m4(self) -> Codes:
        return Codes("Tfds", self._codes, self._data_dir)

    @cached_property
    def _spool(self) -> Spool:
        """Pairs of the datasets whose examples name their languages."""
        return Spool(self._variable_pairs(), self.reading)

    def _variable_pairs(self) -> Iterator[tuple[str, str, Pair]]:
        variable = (dataset for dataset in self._datasets if dataset.languages is None)
        for dataset, (split, part) in itertools.product(variable, self._splits.items()):
            with self._tally(dataset, split) as tally:
                for number, sides in enumerate(dataset.examples(part), 1):
                    english = [text for code, text in sides if code == self.english]
                    if not english:
                        tally.leave_out("no English side")  # only other languages
                        continue
                    for code, text in sides:
                        if code == self.english:
                            continue
                        if texts := tally.pair(number, _text(english[0]), _text(text)):
                            own = self.hash_split(texts.first) if self.hash_split else split
                            yield pair_of(self._m4(code, dataset.folder)), own, texts

    def _tally(self, dataset: _Dataset, split: str) -> AbstractContextManager[Tally]:
        part = self._splits[split]
        return self.reading.of(f"{dataset.name} {part}", f"{dataset.folder} {part}", "example")


class _Dataset:
    """A prepared dataset with its feature of translations."""

    def __init__(self, name: str, folder: epath.Path, english: str, splits: Iterable[str]) -> None:
        import tensorflow_datasets as tfds  # seconds, and hundreds of megabytes

        self.name, self.folder, self._english, self._tfds = name, folder, english, tfds
        self.codes: dict[str, str] = {}  # language pair -> TFDS's code of the other language
        _check_code(folder)
        self._builder: Any = tfds.builder_from_directory(folder)
        features: Any = self._builder.info.features
        same = tfds.features.Translation
        kinds = (same, tfds.features.TranslationVariableLanguages)
        self._feature: str | None = None
        if not isinstance(features, kinds):
            fitting = [name for name, feature in features.items() if isinstance(feature, kinds)]
            if len(fitting) != 1:
                said = "not a dataset of translations, its features are"
                raise InputError(f"{folder}: {said} {', '.join(features)} (Tfds.datasets)")
            self._feature = fitting[0]
            features = features[self._feature]
        # None if each example names its own.
        self.languages = list(features.languages) if isinstance(features, same) else None
        if self.languages is not None and english not in self.languages:
            said = f"has {', '.join(self.languages)}, no {english!r}"
            raise InputError(f"{folder}: {said} (Tfds.english)")
        there = list(self._builder.info.splits)
        for split in splits:
            if split.partition("[")[0] not in there:
                settings = "Tfds.splits; Tfds.dev_every and test_every split what is in one piece"
                said = f"no split {split!r}; it has {', '.join(there)}"
                raise InputError(f"{folder}: {said} ({settings})")

    def pairs(self, split: str, code: str) -> Iterator[tuple[bytes, bytes]]:
        """Yields both sides of every example, if all have the same languages."""
        for sides in self._read(split, _BATCH):
            yield from zip(sides[self._english], sides[code], strict=True)

    def examples(self, split: str) -> Iterator[list[tuple[str, bytes]]]:
        """Yields (code, text) of all sides of every example, if each names its languages."""
        for sides in self._read(split):
            codes = (code.decode() for code in sides["language"])
            yield list(zip(codes, sides["translation"], strict=True))

    def _read(self, split: str, batch: int = 0) -> Iterator[Any]:
        """Yields the feature of each example, or of each batch."""
        # In file order, without reading ahead or caching.
        config = self._tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
        dataset = self._builder.as_dataset(split=split, shuffle_files=False, read_config=config)
        for one in self._tfds.as_numpy(dataset.batch(batch) if batch else dataset):
            yield one if self._feature is None else one[self._feature]


def _check_code(folder: epath.Path) -> None:
    """Raises InputError if reading a dataset would import a module that its files name."""

    def classes(found: Any) -> Iterator[str]:
        if isinstance(found, dict):
            names = ("pythonClassName", "python_class_name", "type")
            yield from (found[name] for name in names if isinstance(found.get(name), str))
            found = found.values()
        for one in found if not isinstance(found, str | int | float | None) else ():
            yield from classes(one)

    def check(found: dict[str, Any]) -> None:
        if other := [one for one in classes(found) if not one.startswith(_OWN)]:
            said = f"its features are code of another package ({other[0]})"
            raise InputError(f"{folder}: {said}: only those of {_OWN[:-1]} are read")

    if (path := folder / "features.json").exists():
        read_json(path, parse=check)


def _text(content: bytes) -> str | Reason:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return Reason("not UTF-8")
