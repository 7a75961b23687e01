"""The embedded corpus of real sentences: the messages of programs, out of the wheels that
`make catalogues` unpacks."""

from __future__ import annotations

import email
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from functools import cached_property
from typing import Annotated, NamedTuple

from etils import epath

from m4.data.cldr import tags
from m4.data.sources import SPLITS, Pair
from m4.data.sources.catalogues import Entry
from m4.data.sources.gettext import Gettext
from m4.data.sources.reading.layout import File
from m4.data.splits import normal
from m4.settings import OneOf, SettingError, checked

FOLDER = os.path.join(sys.prefix, "share", "m4", "catalogues")
_MARKUP = re.compile(r"</?[A-Za-z]|&#?\w+;|https?:|[\w`]``|``?\w|\{%")


@checked
@dataclass(eq=False)
class Packages(Gettext):
    """Sentence pairs from the catalogues of Python packages, each English sentence once a language.

    Packages are only read, never imported. A language has the first translation of a sentence, in
    the order of the files' names; sentences that differ in case, width and spacing only are one.
    Left out and counted in addition to what `Gettext` leaves out: markup, what is the same
    on both sides, what was there before, and catalogues that cannot be read: packages are as they
    are. A language's pairs stay in memory.

    folder: where the packages are; their names, versions and licences are in `identity`, and so in
    the corpus' manifest.
    """

    folder: str | os.PathLike[str] = FOLDER
    files: str = "**/{lang}/LC_MESSAGES/*"
    on_bad_line: Annotated[str, OneOf(("fail", "skip"))] = "skip"
    codes: Mapping[str, str] | None = field(default_factory=lambda: {"pt_PT": "pt"})
    placeholders: Annotated[str, OneOf(("same", "drop", "keep"))] = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._read_once: dict[str, _Language] = {}
        named = {code: language for language, code in self.layout.codes.items()}
        self.layout.language = lambda code, path=None: named.get(code) or tags.shortest(code)

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        """The pairs of a language, without sentences that were there before."""
        assert split in SPLITS, split
        if language not in self.languages():
            raise self.layout.unknown(language, self.languages())
        if language not in self._read_once:
            self._read_once[language] = self._united(language)
        found = self._read_once[language]
        for pair, origin in found.pairs:
            if self.hash_split(pair.english) == split:
                self.reading.origin = origin
                yield pair
        self.reading.restore(found.counts)

    def _united(self, language: str) -> _Language:
        files = [file for file in self._files if file.language == language]
        seen, pairs, repeated = set(), [], Counter()
        for file in files:
            for _, pair in self._read([file]):
                if (key := normal(pair.english)) in seen:
                    repeated[file.name] += 1
                    continue
                seen.add(key)
                pairs.append((pair, self.reading.origin))
        self.reading.skipped.update({(name, "there before"): n for name, n in repeated.items()})
        return _Language(pairs, self.reading.counts_of(file.name for file in files))

    def licences(self) -> dict[str, str]:
        """'django 5.2' -> 'BSD-3-Clause', as each package says."""
        packages = {}
        for path in epath.Path(self.folder).iterdir():
            if path.name.endswith(".dist-info"):
                of = email.message_from_string((path / "METADATA").read_text())
                packages[f"{of['Name']} {of['Version']}"] = _licence(of)
        return dict(sorted(packages.items()))

    def _choose(self, files: list[File]) -> list[File]:
        self.layout.not_taken.clear()  # a catalogue of no language is no mistake here
        return super()._choose(files)

    def _settings(self) -> dict:
        return {**super()._settings(), "licences": self.licences()}

    def _unwanted(self, entry: Entry) -> str | None:
        if reason := super()._unwanted(entry):
            return reason
        if entry.english.strip() == entry.translation.strip():
            return "the same on both sides"
        return "markup" if _MARKUP.search(f"{entry.english} {entry.translation}") else None

    @cached_property
    def _files(self) -> list[File]:
        try:
            return super()._files
        except SettingError as error:
            allowed = f"{error.allowed}: `make catalogues` in m4's repository makes the default one"
            raise SettingError(error.setting, error.value, allowed) from error


class _Language(NamedTuple):
    """A language's pairs, each with its file and line, and what was counted of its files."""

    pairs: list[tuple[Pair, tuple[str, int]]]
    counts: list[dict[tuple[str, str], int]]


def _licence(of: Message) -> str:
    """A package's SPDX expression; else what its classifiers or its field License say."""
    classified = [
        name.rpartition(" :: ")[2]
        for name in of.get_all("Classifier", [])
        if name.startswith("License :: ")
    ]
    found = of.get("License-Expression") or ", ".join(classified) or of.get("License", "")
    return found.strip().partition("\n")[0] or "not said"
