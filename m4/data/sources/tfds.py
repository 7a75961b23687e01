"""Reads TensorFlow Datasets that `tfds build` has prepared; nothing is downloaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from etils import epath

from m4.data.directions import pair_of
from m4.data.sources import SPLITS, Pair
from m4.data.sources.reading.files import digest, folder_at
from m4.data.sources.reading.folder import Every, Spool
from m4.data.sources.reading.layout import Codes
from m4.data.sources.reading.lines import MAX_LINE_BYTES, Reading, Reason
from m4.data.splits import HashSplit
from m4.settings import Between, InputError, OneOf, SettingError, checked
from m4.storage.files import read_json

_BATCH = 1024
_OWN = "tensorflow_datasets."  # whose features are read


@checked
@dataclass(eq=False)
class Tfds:
    """Sentence pairs of prepared datasets: opus, wmt*, flores, ted_hrlr, ted_multi ...

    A dataset has a feature `Translation` (a language pair, or several languages of which one is
    English) or `TranslationVariableLanguages` (as ted_multi: then it is read once and its languages
    are sorted by language on disk). Several datasets with one language follow each other.

    Attributes:
        datasets: 'name/config' or 'name/config:version' (without it the newest), as for
            `tfds build`.
        data_dir: Defaults to TFDS_DATA_DIR, else ~/tensorflow_datasets.
        splits: Split -> TFDS's, which may be a part ('train[:90%]'). Defaults to train, validation
            and test; with dev_every and test_every to train alone, split by a hash of the English.

    The others are those of `m4.data.sources.reading.folder.Folder`.
    """

    datasets: str | Sequence[str]
    data_dir: str | os.PathLike[str] | None = None
    splits: Mapping[str, str] | None = None
    english: str = "en"
    codes: Mapping[str, str] | None = None
    dev_every: Every = 0
    test_every: Every = 0
    on_bad_line: Annotated[str, OneOf(("fail", "skip"))] = "fail"
    max_line_bytes: Annotated[int, Between(1, 2**30)] = MAX_LINE_BYTES

    def __post_init__(self) -> None:
        self.reading = Reading("Tfds", self.on_bad_line, self.max_line_bytes)
        self.hash_split = HashSplit("Tfds", self.dev_every, self.test_every)
        splits = self.splits
        if splits is None:
            splits = {"train": "train"}
            if not self.hash_split:
                splits |= {"dev": "validation", "test": "test"}
        known = {"train"} if self.hash_split else set(SPLITS)
        if "train" not in splits or not set(splits) <= known:
            allowed = (
                "of train (needed), dev and test; of train alone with dev_every and test_every"
            )
            raise SettingError("Tfds.splits", splits, allowed)
        if not self.datasets:
            raise SettingError("Tfds.datasets", self.datasets, "at least one name")
        self._splits = dict(splits)
        self._codes = dict(self.codes or {})

    def language_pairs(self) -> list[str]:
        """Returns the pairs of all datasets, sorted; imports TensorFlow Datasets (seconds)."""
        found = {
            pair_of(self._m4(code, dataset.folder))
            for dataset in self._datasets
            for code in dataset.codes or ()
        }
        return sorted(found.union(self._spool.language_pairs()))

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the pairs of a language with English, dataset by dataset, as in their files."""
        assert split in SPLITS, split
        if (pair := pair_of(pair)) not in (there := self.language_pairs()):
            raise InputError(
                f"{self._data_dir}: no {pair} in {', '.join(self._folders)}; there is "
                f"{', '.join(there) or 'no language'} (Tfds.datasets, Tfds.codes)"
            )
        origin = "train" if self.hash_split else split
        for dataset in self._datasets:
            codes = (code for code in dataset.codes or () if pair_of(self._m4(code)) == pair)
            code = next(codes, None)
            if code is None or origin not in self._splits:
                continue
            with self.reading.of(*self._names(dataset, origin), "example") as tally:
                for number, (english, translation) in enumerate(
                    dataset.pairs(self._splits[origin], self.english, code), 1
                ):
                    texts = tally.pair(number, _text(english), _text(translation))
                    if texts and (not self.hash_split or self.hash_split(texts.first) == split):
                        yield texts
        yield from self._spool.pairs(pair, split)

    def identity(self) -> dict:
        """Returns the settings, and sizes and SHA-256 of the files; without TensorFlow."""
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
            listed = f"{', '.join(sorted(there))} is there" if there else "nothing is there"
            raise InputError(
                f"{folder}: no prepared dataset{version and f' of version {version}'}, {listed}; "
                f"`tfds build {dataset} --data_dir={self._data_dir}` makes it (Tfds.datasets)"
            )
        return folder / max(versions, key=lambda text: [int(part) for part in text.split(".")])

    @cached_property
    def _data_dir(self) -> epath.Path:
        default = os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")
        return folder_at(self.data_dir or default, "Tfds.data_dir")

    @cached_property
    def _m4(self) -> Codes:
        return Codes("Tfds", self._codes, self._data_dir)

    @cached_property
    def _folders(self) -> dict[str, epath.Path]:
        names = [self.datasets] if isinstance(self.datasets, str) else self.datasets
        return {name: self._version_folder(name) for name in names}

    @cached_property
    def _datasets(self) -> list[_Dataset]:
        found = [_Dataset(name, folder) for name, folder in self._folders.items()]
        for dataset in found:
            dataset.check(self.english, self._splits.values())
        return found

    @cached_property
    def _spool(self) -> Spool:
        """Pairs of the datasets whose examples name their languages."""
        return Spool(self._variable_pairs(), self.reading)

    def _variable_pairs(self) -> Iterator[tuple[str, str, Pair]]:
        for dataset in self._datasets:
            if dataset.codes is not None:
                continue
            for split, origin in self._splits.items():
                with self.reading.of(*self._names(dataset, split), "example") as tally:
                    for number, sides in enumerate(dataset.examples(origin), 1):
                        english = sides.pop(self.english, None)
                        if english is None:
                            tally.leave_out("no English side")  # of other languages alone
                            continue
                        for code, texts in sides.items():
                            for text in texts:
                                if pair := tally.pair(number, _text(english[0]), _text(text)):
                                    own = self.hash_split(pair.first) if self.hash_split else split
                                    yield pair_of(self._m4(code)), own, pair

    def _names(self, dataset: _Dataset, split: str) -> tuple[str, str]:
        return f"{dataset.name} {self._splits[split]}", f"{dataset.folder} {self._splits[split]}"


class _Dataset:
    """A prepared dataset with its feature of translations."""

    def __init__(self, name: str, folder: epath.Path) -> None:
        import tensorflow_datasets as tfds  # seconds, and hundreds of megabytes

        self.name, self.folder = name, folder
        _check_code(folder)
        self._builder: Any = tfds.builder_from_directory(folder)
        self._as_numpy = tfds.as_numpy
        # In the order of the files; nothing read ahead, nothing kept.
        self._read_config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
        features: Any = self._builder.info.features
        self._feature: str | None = None
        kinds = (tfds.features.Translation, tfds.features.TranslationVariableLanguages)
        if not isinstance(features, kinds):
            fitting = [name for name, feature in features.items() if isinstance(feature, kinds)]
            if len(fitting) != 1:
                raise InputError(
                    f"{folder}: not a dataset of translations, its features are "
                    f"{', '.join(features)} (Tfds.datasets)"
                )
            self._feature = fitting[0]
            features = features[self._feature]
        # None: every example has its own languages.
        self.codes: list[str] | None = None
        if isinstance(features, tfds.features.Translation):
            self.codes = list(features.languages)

    def check(self, english: str, splits: Any) -> None:
        """Raises InputError for no English or no such split; removes English from the codes."""
        if self.codes is not None:
            if english not in self.codes:
                raise InputError(
                    f"{self.folder}: has {', '.join(self.codes)}, no {english!r} (Tfds.english)"
                )
            self.codes = [code for code in self.codes if code != english]
        there = list(self._builder.info.splits)
        for split in splits:
            if split.partition("[")[0] not in there:
                raise InputError(
                    f"{self.folder}: no split {split!r}; it has {', '.join(there)} "
                    f"(Tfds.splits; Tfds.dev_every and test_every split what is in one piece)"
                )

    def pairs(self, split: str, english: str, code: str) -> Iterator[tuple[bytes, bytes]]:
        """Yields both sides of every example, where all have the same languages."""
        for batch in self._as_numpy(self._open(split).batch(_BATCH)):
            sides = batch if self._feature is None else batch[self._feature]
            yield from zip(sides[english], sides[code], strict=True)

    def examples(self, split: str) -> Iterator[dict[str, list[bytes]]]:
        """Yields code -> texts of every example, where each names its languages."""
        for example in self._as_numpy(self._open(split)):
            sides = example if self._feature is None else example[self._feature]
            texts: dict[str, list[bytes]] = {}
            for code, text in zip(sides["language"], sides["translation"], strict=True):
                texts.setdefault(code.decode(), []).append(text)
            yield texts

    def _open(self, split: str) -> Any:
        return self._builder.as_dataset(
            split=split, shuffle_files=False, read_config=self._read_config
        )


def _check_code(folder: epath.Path) -> None:
    """Raises InputError where reading a dataset would import a module, which its files name."""

    def classes(found: Any) -> Iterator[str]:
        for name, value in found.items() if isinstance(found, dict) else ():
            if name in ("pythonClassName", "python_class_name", "type") and isinstance(value, str):
                yield value
        inside = found.values() if isinstance(found, dict) else found
        for one in inside if isinstance(found, dict | list) else ():
            yield from classes(one)

    def check(found: dict[str, Any]) -> None:
        if other := [one for one in classes(found) if not one.startswith(_OWN)]:
            raise InputError(
                f"{folder}: its features are code of another package ({other[0]}): only features "
                f"of {_OWN[:-1]} are read (Tfds.datasets)"
            )

    if (path := folder / "features.json").exists():
        read_json(path, parse=check)


def _text(content: bytes) -> str | Reason:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return Reason("not UTF-8")
