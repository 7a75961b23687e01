"""The stage language_id, which drops text in the wrong language."""

import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from m4.data.arrays import Mask
from m4.data.cleaning import Check, CleaningStage, Findings, Opened, Share
from m4.data.directions import SIDES, split_direction
from m4.data.languages import describe
from m4.settings import Between, checked

PACKAGE = "py3langid"
NOT_INSTALLED = f"{PACKAGE} is not installed (`make langid`)"
# ISO 639's codes for undetermined text and no linguistic content.
_NO_LANGUAGE = ("und", "zxx")

# Varieties that identifiers distinguish but m4's table does not; they count as the same language.
_PARTS = {
    "hbo": "he", "ary": "ar", "arz": "ar", "wuu": "zh", "yue": "zh", "uzs": "uz", "grc": "el",
    "sdh": "ku", "nn": "no", "nb": "no",
}  # fmt: skip


class Identifier(Protocol):
    """Identifier of a text's language. Codes are ISO 639-1 if they exist, otherwise 639-3."""

    def languages(self) -> set[str]:
        """Returns the codes that it may return."""
        ...

    def identify(self, text: str) -> tuple[str, float]:
        """Returns the likeliest language and its probability, 0 to 1."""
        ...

    def identity(self) -> dict[str, Any]:
        """Returns, as JSON, everything that decides its answers."""
        ...


@checked
@dataclass(frozen=True)
class LanguageId(CleaningStage):
    """Drops a pair with a side that an identifier takes for another language.

    Only an identifier that is sure counts (`least_sure`), and only sides of `least_letters` letters
    or more: short sentences are guesses. A language of the same branch (m4/data/languages.py) is
    not held against a pair, because identifiers mistake relatives for each other, small languages
    for large ones above all.

    Attributes:
        least_sure: Least probability of an identification that counts.
        least_letters: Least number of letters of a side that is identified.
        identifier: Function that makes the identifier. Defaults to py3langid (140 languages). If it
            is not installed (`make langid`), the stage does not run, and the report says so.
    """

    name: ClassVar[str] = "language_id"
    least_sure: Share = 0.9
    least_letters: Annotated[int, Between(1, 10**6)] = 20
    identifier: Callable[[], Identifier] | None = None

    def identity(self) -> dict[str, Any]:
        own = _package() if installed() else None  # the package changes which text is kept
        by = own if self.identifier is None else self.identifier().identity()
        settings = {"least_sure": self.least_sure, "least_letters": self.least_letters}
        return {**settings, "identifier": by}

    def open(self, language_pairs: Sequence[str]) -> Opened:
        if self.identifier is None and not installed():
            return lambda pair, split: NOT_INSTALLED
        identifier = Py3langid() if self.identifier is None else self.identifier()
        known = identifier.languages()

        def check(pair: str, split: str) -> Check | str:
            languages = dict(zip(SIDES, split_direction(pair), strict=True))
            codes = {side: identifiers_code(code, known) for side, code in languages.items()}
            checked = [side for side in SIDES if codes[side] in known]
            # A mere claim of English tells little: nearly every text is rightly English.
            if not {languages[side] for side in checked} - {"en"}:
                return "the identifier does not know the language"
            return lambda chunk: Findings(
                {f"{s} side": self._wrong(chunk.side(s), codes[s], identifier) for s in checked}
            )

        return check

    def _wrong(self, texts: Sequence[str], wanted: str, identifier: Identifier) -> Mask:
        branch, same = describe(wanted).branch, {_PARTS.get(wanted, wanted), *_NO_LANGUAGE}
        wrong = np.zeros(len(texts), bool)
        for row, text in enumerate(texts):
            if sum(map(str.isalpha, text)) >= self.least_letters:
                found, sure = identifier.identify(text)
                found = _PARTS.get(found, found)
                related = branch and describe(found).branch == branch
                wrong[row] = sure >= self.least_sure and found not in same and not related
        return wrong


class Py3langid:
    """The identifier of the package py3langid: naive Bayes over byte n-grams.

    Source: Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool".
    """

    def __init__(self) -> None:
        langid = importlib.import_module(f"{PACKAGE}.langid")  # optional: `make langid`
        self._model = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)

    def languages(self) -> set[str]:
        return set(self._model.labels)

    def choose_among(self, codes: Collection[str]) -> None:
        """Limits the answers to these codes out of `languages`."""
        self._model.set_languages(sorted(codes))

    def identify(self, text: str) -> tuple[str, float]:
        return self._model.classify(text)

    def identity(self) -> dict[str, Any]:
        return _package()


def _package() -> dict[str, Any]:
    return {"package": PACKAGE, "version": metadata.version(PACKAGE)}


def installed() -> bool:
    """Returns whether py3langid is installed, or in the folder of `make langid`."""
    folder = Path(sys.prefix) / "share" / "m4" / "langid"
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that its other packages are not used
    return importlib.util.find_spec(PACKAGE) is not None


# Codes of identifiers for languages of m4's table that they do not distinguish.
_OTHER_NAMES = {"nb": "no", "nn": "no", "fil": "tl", "yue": "zh", "ckb": "ku"}


def identifiers_code(language: str, known: Collection[str]) -> str:
    """Returns a language's code among those that an identifier knows, if any."""
    described = describe(language)
    plain = described.code.split("_")[0]
    names = (plain, described.iso639_3, _OTHER_NAMES.get(plain, ""))
    return next((name for name in names if name in known), plain)
