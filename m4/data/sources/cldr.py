"""The embedded corpus: English and up to 137 languages from Unicode CLDR, through Babel.

Names of places, languages, scripts, currencies, cities and time zones; amounts, money, dates,
times, intervals, relative times, durations; and lists of them, joined by CLDR's own patterns. It is
controlled language: it shows relative claims (multilingual against bilingual, score against size),
not general translation quality. Nothing is invented: what a locale does not give, it does not say.

No leakage: dev and test are chosen by a hash of the English text, so an English dev or test
sentence is in no language's training pairs; about 6 % of the names and units are held out of a
language's training pairs altogether, so that a right translation of them is transfer.

Text: Unicode CLDR, Unicode License V3. What CLDR's files do not have: case and gender after units
and in lists (all is nominative), and the sound rules of some `and`s (Spanish y/e).
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from m4.data.cldr.phrases import Spec, english, phrases
from m4.data.cldr.specs import Atom, Drawer, atoms
from m4.data.cldr.tables import cldr_version
from m4.data.directions import key_of, pair_of
from m4.data.languages import LANGUAGES
from m4.data.sources import SPLITS, Pair
from m4.data.splits import text_hash
from m4.settings import Between, Count, InputError, SettingError, checked

# Raise it when drawing, rendering or filtering changes the text; a test holds both together.
GENERATOR = 1
# Draws in a row without a new pair after which a language counts as exhausted.
PATIENCE = 20_000
MOST_CHARACTERS = 120
TEST_PERMILLE, DEV_PERMILLE = 20, 10
HELD_ONE_IN = 16
_WORDS = re.compile(r"[^\W\d_]{2,}")  # letters only, two or more: digits and "e" are no words


# CLDR gives some 50,000 different sentences a language.
Pairs = Annotated[int, Between(1, 10**7)]


class _Drawn(NamedTuple):
    """A language's pairs of a split, and the names and units of each."""

    pairs: list[Pair]
    atoms: list[tuple[Atom, ...]]


def power_law(largest: int, smallest: int) -> dict[str, int]:
    """Returns training pairs a language, log-linear in rank (as in M4)."""
    ratio = smallest / largest
    last = len(LANGUAGES) - 1
    return {code: round(largest * ratio ** (rank / last)) for rank, code in enumerate(LANGUAGES)}


@checked
@dataclass(eq=False)
class Cldr:
    """The corpus `cldr`, which depends on its arguments and the CLDR version alone.

    Pairs are made when a language is first asked for and kept. Digits are those of the locale's
    default numbering system: fa, ps, bn, as, mr, ne, my, sd and ckb have their own.

    Attributes:
        sizes: Language -> training pairs. Defaults to all 137 languages, from `largest` to
            `smallest`.
        test_pairs: Test pairs of each language.
        dev_pairs: Dev pairs of each language.
    """

    sizes: Mapping[str, Pairs] | None = None
    largest: Pairs = 5000
    smallest: Pairs = 120
    seed: Count = 0
    test_pairs: Pairs = 200
    dev_pairs: Pairs = 100

    def __post_init__(self) -> None:
        if self.sizes is None and self.smallest > self.largest:
            raise SettingError(
                "Cldr.smallest", self.smallest, f"at most Cldr.largest, {self.largest}"
            )
        sizes = power_law(self.largest, self.smallest) if self.sizes is None else self.sizes
        for code in sizes:
            if code not in LANGUAGES:
                raise SettingError(
                    "Cldr.sizes", code, f"a language of the corpus: {_nearest(code)}"
                )
        self.sizes = self._sizes = dict(sizes)
        self.counts = {"test": self.test_pairs, "dev": self.dev_pairs}
        self._drawn: dict[tuple[str, str], _Drawn] = {}
        self._common: Drawer | None = None
        self._candidates: dict[str, list[tuple[Spec, str]]] = {"dev": [], "test": []}
        self._candidate_texts: set[str] = set()

    def language_pairs(self) -> list[str]:
        """Returns the pairs of English and the languages of `sizes`, in its order."""
        return [*map(pair_of, self._sizes)]

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Returns the pairs of English and a language: distinct English sides, as drawn.

        Dev and test take their sentences from one stream for all languages, in order, so most of a
        test set is the same sentences everywhere. InputError: the language has fewer pairs.
        """
        return iter(self._of(pair, split).pairs)

    def subsets(self, pair: str, split: str) -> dict[str, list[bool]]:
        """Marks sentences all of whose names and units are in the training pairs as 'seen'."""
        trained = {atom for sentence in self._of(pair, "train").atoms for atom in sentence}
        return {"seen": [trained.issuperset(atoms) for atoms in self._of(pair, split).atoms]}

    def identity(self) -> dict:
        """Returns all that decides the text, as JSON."""
        return {
            "source": "cldr",
            "generator": GENERATOR,
            "cldr": cldr_version(),
            "seed": self.seed,
            "sizes": self._sizes,
            **{f"{split}_pairs": count for split, count in self.counts.items()},
        }

    def _of(self, pair: str, split: str) -> _Drawn:
        if (language := key_of(pair)) not in self._sizes:
            listed = ", ".join(self._sizes)
            raise InputError(f"no pairs of {language!r}: Cldr.sizes has only {listed}")
        if split not in SPLITS:
            raise InputError(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
        if (language, split) not in self._drawn:
            made = self._draw(language) if split == "train" else self._take(language, split)
            self._drawn[language, split] = made
        return self._drawn[language, split]

    def _draw(self, language: str) -> _Drawn:
        """Draws training pairs."""
        wanted = self._sizes[language]
        drawer = Drawer(text_hash(f"{self.seed} {language}"))
        source, target = english(), phrases(language)
        drawn, taken, fruitless = _Drawn([], []), set(), 0
        while len(drawn.pairs) < wanted:
            fruitless += 1
            if fruitless > PATIENCE:
                raise InputError(_too_few(language, "train", wanted, len(drawn.pairs)))
            spec = drawer.draw()
            if (translation := target.render(spec)) is None:
                continue
            text = source.render(spec)
            if text is None or text in taken or not accept(text, translation):
                continue
            names = atoms(spec)
            if split_of(text) != "train" or any(held(language, atom) for atom in names):
                continue
            taken.add(text)
            drawn.pairs.append(Pair(text, translation))
            drawn.atoms.append(names)
            fruitless = 0
        return drawn

    def _take(self, language: str, split: str) -> _Drawn:
        """Returns the first sentences of the common stream that this language can say."""
        wanted, target = self.counts[split], phrases(language)
        drawn = _Drawn([], [])
        last = candidate = 0  # the candidate that gave the last pair, and the next one
        while len(drawn.pairs) < wanted:
            if candidate - last > PATIENCE // 50:  # one draw in 50 is a test sentence
                raise InputError(_too_few(language, split, wanted, len(drawn.pairs)))
            spec, text = self._candidate(split, candidate)
            candidate += 1
            translation = target.render(spec)
            if translation is not None and accept(text, translation):
                drawn.pairs.append(Pair(text, translation))
                drawn.atoms.append(atoms(spec))
                last = candidate
        return drawn

    def _candidate(self, split: str, index: int) -> tuple[Spec, str]:
        """Returns sentence `index` of the common stream's dev or test part."""
        if self._common is None:
            self._common = Drawer(text_hash(f"{self.seed} common"))
        candidates = self._candidates[split]
        while len(candidates) <= index:
            spec = self._common.draw()
            text = english().render(spec)
            if text is None or text in self._candidate_texts:
                continue
            if (part := split_of(text)) != "train":
                self._candidate_texts.add(text)
                self._candidates[part].append((spec, text))
        return candidates[index]


def _nearest(code: str) -> str:
    """Returns the languages with names like this one, or all, as text."""
    by_word = {
        word.casefold(): known
        for known, language in LANGUAGES.items()
        for word in (language.name, language.iso639_3, known)
    }
    words = difflib.get_close_matches(str(code).casefold(), by_word, n=5, cutoff=0.5)
    near = dict.fromkeys(by_word[word] for word in words)
    return f"nearest: {', '.join(near)}" if near else ", ".join(LANGUAGES)


def _too_few(language: str, split: str, wanted: int, available: int) -> str:
    change = f"Cldr.sizes[{language!r}]" if split == "train" else f"Cldr.{split}_pairs"
    return f"{language} has {available} {split} pairs, not {wanted}: lower {change}"


def split_of(english: str) -> str:
    """Returns 'train', 'dev' or 'test' by the English text: the same in every language."""
    value = text_hash(english) % 1000
    if value < TEST_PERMILLE:
        return "test"
    return "dev" if value < TEST_PERMILLE + DEV_PERMILLE else "train"


def held(language: str, atom: Atom) -> bool:
    """Returns whether `atom` is kept out of this language's training pairs (about 6 % are)."""
    return text_hash(f"{language} {atom[0]} {atom[1]}") % HELD_ONE_IN == 0


def accept(english: str, translation: str) -> bool:
    """Returns whether there is something to translate: no copy, with letters, not too long.

    A copy is an equal text, or one half or more of whose different words stand in the English.
    Letters that make no word ("2.5 m", "5月18日") pass.
    """
    if len(english) > MOST_CHARACTERS or len(translation) > MOST_CHARACTERS:
        return False
    source, target = english.casefold(), translation.casefold()
    if source == target:
        return False
    words = set(_WORDS.findall(target))
    if not words:
        return any(character.isalpha() for character in target)
    return 2 * len(words.intersection(_WORDS.findall(source))) < len(words)
