"""Language identification: text in another language than it should be."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt

from m4.data.cleaning import Check, Findings, NotChecked, Opened, Share
from m4.data.cleaning.chunk import Chunk
from m4.data.directions import SIDES
from m4.data.languages import describe
from m4.settings import Between, checked

PACKAGE = "py3langid"
# ISO 639's codes for undetermined and for no linguistic content.
_NO_LANGUAGE = ("und", "zxx")

# Parts of languages that identifiers distinguish and m4's table does not: not held against a text.
_PARTS = {
    "hbo": "he", "ary": "ar", "arz": "ar", "wuu": "zh", "yue": "zh", "uzs": "uz", "grc": "el",
    "sdh": "ku", "nn": "no", "nb": "no",
}  # fmt: skip


class Identifier(Protocol):
    """Identifies the language of a text. Codes are ISO 639-1, or 639-3 where there is none."""

    def languages(self) -> set[str]:
        """The codes that it can give."""
        ...

    def identify(self, text: str) -> tuple[str, float]:
        """The likeliest language and how likely it is, 0 to 1."""
        ...

    def identity(self) -> dict[str, Any]:
        """All that decides its answers, as JSON."""
        ...


@checked
@dataclass(frozen=True)
class LanguageId:
    """Drops a pair with a side that an identifier takes for another language.

    Only an identifier that is sure counts (`least_sure`), and only sides of `least_letters` letters
    or more: short sentences are guesses. A language of the same branch (m4/data/languages.py) is
    not held against a pair, because identifiers mistake relatives for each other, small languages
    for large ones above all.

    identifier: () -> Identifier. None: py3langid, the extra `langid` (140 languages, its
    model in the package). Where it is not installed the stage does not run, and the report says so.
    """

    least_sure: Share = 0.9
    least_letters: Annotated[int, Between(1, 10**6)] = 20
    identifier: Callable[[], Identifier] | None = None

    @property
    def name(self) -> str:
        return "language_id"

    def identity(self) -> dict[str, Any]:
        if self.identifier is not None:
            by: dict[str, Any] | None = self.identifier().identity()
        else:
            by = _package() if installed() else None  # another text where it is installed
        settings = {"least_sure": self.least_sure, "least_letters": self.least_letters}
        return {**settings, "identifier": by}

    def open(self, languages: Sequence[str]) -> Opened:
        if self.identifier is None and not installed():
            missing = NotChecked(f"{PACKAGE} is not installed (pip install 'm4[langid]')")
            return lambda language, split: missing
        identifier = Py3langid() if self.identifier is None else self.identifier()
        known = identifier.languages()

        def check(language: str, split: str) -> Check | NotChecked:
            codes = {"english": "en", "translation": identifiers_code(language, known)}
            checked = [side for side in SIDES if codes[side] in known]
            if "translation" not in checked:
                return NotChecked("the identifier does not know the language")

            def look(chunk: Chunk) -> Findings:
                return Findings(
                    {
                        f"{side} side": self._wrong(chunk.side(side), codes[side], identifier)
                        for side in checked
                    }
                )

            return look

        return check

    def _wrong(
        self, texts: Sequence[str], wanted: str, identifier: Identifier
    ) -> npt.NDArray[np.bool_]:
        branch = describe(wanted).branch
        wrong = np.zeros(len(texts), bool)
        for row, text in enumerate(texts):
            if sum(map(str.isalpha, text)) < self.least_letters:
                continue
            found, sure = identifier.identify(text)
            found = _PARTS.get(found, found)
            related = branch and describe(found).branch == branch
            other = found not in (_PARTS.get(wanted, wanted), *_NO_LANGUAGE) and not related
            wrong[row] = other and sure >= self.least_sure
        return wrong


class Py3langid:
    """The identifier of the package py3langid: naive Bayes over byte n-grams.

    Source: Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool".
    """

    def __init__(self) -> None:
        langid = importlib.import_module(f"{PACKAGE}.langid")  # optional: the extra `langid`
        model = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        self._model, self._about = model, _package()

    def languages(self) -> set[str]:
        return set(self._model.labels)

    def choose_among(self, codes: Collection[str]) -> None:
        """From now on it gives only these codes, of `languages`."""
        self._model.set_languages(sorted(codes))

    def identify(self, text: str) -> tuple[str, float]:
        return self._model.classify(text)

    def identity(self) -> dict[str, Any]:
        return self._about


def _package() -> dict[str, Any]:
    return {"package": PACKAGE, "version": metadata.version(PACKAGE)}


def installed() -> bool:
    """Whether py3langid is there."""
    return importlib.util.find_spec(PACKAGE) is not None


def for_reports() -> Py3langid | None:
    """py3langid, installed or where `make langid` puts it; None: it is in neither place.

    From there it is not importable afterwards either: what cleaning does must not depend on which
    job ran before in the process.
    """
    if installed():
        return Py3langid()
    folder = str(Path(sys.prefix) / "share" / "m4" / "langid")
    sys.path.insert(0, folder)
    try:
        return Py3langid() if installed() else None
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]


# What identifiers call languages of m4's table that they do not know apart.
_OTHER_NAMES = {"nb": "no", "nn": "no", "fil": "tl", "yue": "zh", "ckb": "ku"}


def identifiers_code(language: str, known: Collection[str]) -> str:
    """What an identifier of the codes `known` calls an m4 language; none of them: it does not
    know it."""
    described = describe(language)
    plain = described.code.split("_")[0]
    names = (plain, described.iso639_3, _OTHER_NAMES.get(plain, ""))
    return next((name for name in names if name in known), plain)
