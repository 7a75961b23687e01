"""The embedded corpus: English and up to 137 languages from Unicode CLDR, by Babel.

Its text has names (of places, languages, scripts, currencies, cities, time zones), amounts, money,
dates, times, intervals, durations, and lists of them, joined by CLDR's own patterns. It shows
relative claims (multilingual against bilingual, score against size), not general translation
quality. Nothing is invented for what a locale lacks.

A hash of the English text chooses dev and test, so no English dev or test sentence is in a
language's training pairs. About 6% of the names and units are held out of a language's training
pairs altogether, so that a right translation of them is transfer. CLDR (Unicode License V3) lacks
case and gender after units and in lists, where all is nominative, and the sound rules of some words
for "and" (Spanish y/e).

A sentence is drawn as a specification without regard to any language, and m4/data/cldr/phrases.py
renders it in each. A specification is a tree of tuples, each a kind and what it speaks of:

    atoms      ("terr", "ES") ("lang", "sc") ("script", "Latn") ("cur", "CHF")
               ("city", "Asia/Riyadh") ("mz", "Brasilia", "standard") ("uname", "length-meter")
    amounts    ("qty", unit, number) ("rate", unit, number, per) ("money", currency, number)
               ("big", 5, 6)  5 million
    times      ("ago", "week", "past", 3) ("date", format, day) ("at", format, day, minute)
               ("span", skeleton, day, day)  days as ordinals
    zones      ("zcity", zone, kind, city)
    lists      ("list", "standard" | "or", (spec, ...))  of durations, of one kind, mixed

Numbers are ints, or strings if they have decimals. By the weights below, about half of the
sentences are lists and a tenth of the characters are digits.
"""

import difflib
import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import Annotated, TypeVar

from m4.data.cldr.phrases import Spec, english, phrases
from m4.data.cldr.tables import cldr_version, current_currencies, find, own_data, zones
from m4.data.directions import key_of, pair_of
from m4.data.languages import LANGUAGES
from m4.data.sources import SPLITS, Pair
from m4.data.splits import text_hash
from m4.settings import Between, Count, InputError, SettingError, checked

# Raised when drawing, rendering or filtering changes the text, which a test checks.
GENERATOR = 1
# Number of consecutive draws without a new pair after which a language is exhausted.
PATIENCE = 20_000
MOST_CHARACTERS = 120
TEST_PERMILLE, DEV_PERMILLE = 20, 10
HELD_ONE_IN = 16
_WORDS = re.compile(r"[^\W\d_]{2,}")  # two or more letters: digits and "e" are no words
Atom = tuple[str, str]
Key = TypeVar("Key")


def _picker(weights: dict[Key, int]) -> Callable[[float], Key]:
    """Returns a function from a number in [0, 1) to a key, by the keys' weights."""
    names, edges = list(weights), list(accumulate(weights.values()))
    return lambda uniform: names[bisect(edges, uniform * edges[-1])]


_CATEGORY = _picker(
    {"atom": 10, "qty": 6, "rate": 3, "money": 6, "ago": 4, "date": 6, "at": 6, "span": 4, "big": 1,
     "zcity": 5, "dur": 3, "list1": 24, "listq": 8, "listm": 13}
)  # fmt: skip
_ATOM = _picker({"terr": 22, "lang": 22, "cur": 16, "city": 14, "uname": 11, "mz": 10, "script": 5})
_LISTED = _picker({"terr": 34, "lang": 30, "city": 14, "cur": 12, "uname": 6, "mz": 4, "script": 3})
_LENGTH = _picker({2: 6, 3: 3, 4: 1})
_QUANTITY = _picker({"qty": 5, "money": 4, "rate": 1})
_MIXED = _picker(
    {"atom": 12, "qty": 3, "money": 3, "ago": 2, "date": 2, "at": 1, "span": 1, "zcity": 1}
)
_DATES = ["full", "long", "medium", "MMMd", "MMMMd", "MMMEd", "yMMMM", "yMMMEd", "yQQQQ", "GyMMMd"]
_SPANS = ["MMMd", "MMMEd", "yMMM", "yMMMM", "yMMMd", "yMMMEd"]
_FIELDS = [
    "year", "quarter", "month", "week", "day", "hour", "minute", "second",
    "sun", "mon", "tue", "wed", "thu", "fri", "sat",
]  # fmt: skip
_DURATIONS = ["year", "month", "week", "day", "hour", "minute", "second"]
_FIRST_DAY = date(1850, 1, 1).toordinal()
_DAYS = date(2100, 1, 1).toordinal() - _FIRST_DAY  # 91,310

# CLDR gives about 50,000 different sentences per language.
Pairs = Annotated[int, Between(1, 10**7)]


# A language's pairs in a split, each with its names and units.
_Drawn = list[tuple[Pair, tuple[Atom, ...]]]


def power_law(largest: int, smallest: int) -> dict[str, int]:
    """Returns training pairs by language, log-linear in rank (as in M4)."""
    ratio = smallest / largest
    last = len(LANGUAGES) - 1
    return {code: round(largest * ratio ** (rank / last)) for rank, code in enumerate(LANGUAGES)}


@checked
@dataclass(eq=False)
class Cldr:
    """The corpus `cldr`, which depends only on its arguments and the CLDR version.

    Pairs are made when a language is first asked for and kept. Digits are those of the locale's
    default numbering system: fa, ps, bn, as, mr, ne, my, sd and ckb have their own.

    Attributes:
        sizes: Language -> number of training pairs. Defaults to all 137 languages, from `largest`
            to `smallest`.
        largest: Number of training pairs of the first language, without `sizes`.
        smallest: Number of training pairs of the last one.
        seed: Seed of the sentences of all splits.
        test_pairs: Number of test pairs of each language.
        dev_pairs: Number of dev pairs of each language.
    """

    sizes: Mapping[str, Pairs] | None = None
    largest: Pairs = 5000
    smallest: Pairs = 120
    seed: Count = 0
    test_pairs: Pairs = 200
    dev_pairs: Pairs = 100

    def __post_init__(self) -> None:
        if self.sizes is None and self.smallest > self.largest:
            allowed = f"at most Cldr.largest, {self.largest}"
            raise SettingError("Cldr.smallest", self.smallest, allowed)
        sizes = power_law(self.largest, self.smallest) if self.sizes is None else self.sizes
        for code in sizes:
            if code not in LANGUAGES:
                near = difflib.get_close_matches(str(code), LANGUAGES, n=5, cutoff=0.3)
                allowed = f"a language of the corpus: {', '.join(near or LANGUAGES)}"
                raise SettingError("Cldr.sizes", code, allowed)
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
        return iter([texts for texts, _ in self._of(pair, split)])

    def subsets(self, pair: str, split: str) -> dict[str, list[bool]]:
        """Marks sentences as 'seen' if all their names and units are in the training pairs."""
        trained = {atom for _, atoms in self._of(pair, "train") for atom in atoms}
        return {"seen": [trained.issuperset(atoms) for _, atoms in self._of(pair, split)]}

    def identity(self) -> dict:
        """Returns everything that decides the text, as JSON."""
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
        """Draws a language's training pairs."""
        wanted = self._sizes[language]
        drawer = Drawer(text_hash(f"{self.seed} {language}"))
        source, target = english(), phrases(language)
        drawn: _Drawn = []
        taken, fruitless = set(), 0
        while len(drawn) < wanted:
            fruitless += 1
            if fruitless > PATIENCE:
                raise InputError(_too_few(language, "train", wanted, len(drawn)))
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
            drawn.append((Pair(text, translation), names))
            fruitless = 0
        return drawn

    def _take(self, language: str, split: str) -> _Drawn:
        """Returns the first sentences of the common stream that this language can say."""
        wanted, target = self.counts[split], phrases(language)
        drawn: _Drawn = []
        last = candidate = 0  # the candidate that gave the last pair, and the next one
        while len(drawn) < wanted:
            if candidate - last > PATIENCE // 50:  # one draw in 50 is a test sentence
                raise InputError(_too_few(language, split, wanted, len(drawn)))
            spec, text = self._candidate(split, candidate)
            candidate += 1
            translation = target.render(spec)
            if translation is not None and accept(text, translation):
                drawn.append((Pair(text, translation), atoms(spec)))
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


@lru_cache(maxsize=1)
def inventory() -> dict[str, tuple[Spec, ...]]:
    """Returns the atoms that English names, by kind; a shared name stays with the first.

    So "Arabic" is the language, not the script, and "Luxembourg" the country, not the city: the
    English side never has two meanings.
    """
    own = own_data("en")
    candidates = {
        "terr": [("terr", code) for code in own["territories"]],
        "lang": [("lang", code) for code in own["languages"]],
        "cur": [("cur", code) for code in own["currency_names"]],
        "city": [("city", zone) for zone in zones()],
        "script": [("script", code) for code in own["scripts"]],
        "uname": [("uname", unit) for unit in own["unit_display_names"]],
        "mz": [
            ("mz", zone, kind)
            for zone, names in own["meta_zones"].items()
            for kind in ("generic", "standard", "daylight")
            if find(names, "long", kind)
        ],
    }
    taken: set[str] = set()
    kept: dict[str, tuple[Spec, ...]] = {}
    for kind, specs in candidates.items():
        kept[kind] = ()
        for spec in sorted(specs):
            name = english().render(spec)
            if name and name.casefold() not in taken:
                taken.add(name.casefold())
                kept[kind] += (spec,)
    return kept


def atoms(spec: Spec) -> tuple[Atom, ...]:
    """Returns the lexical atoms of a specification: (kind, identifier), with repetitions.

    Those are the words of the great tables (territories, languages, scripts, currencies, cities,
    zones, units); a unit's name and an amount in it are one atom. Calendar words are none.
    """
    kind = spec[0]
    if kind == "list":
        return tuple(atom for item in spec[2] for atom in atoms(item))
    if kind in ("terr", "lang", "script", "cur", "city", "mz"):
        return (spec[:2],)
    if kind in ("uname", "qty"):
        return (("unit", spec[1]),)
    if kind == "rate":
        return (("unit", spec[1]), ("unit", spec[3]))
    if kind == "money":
        return (("cur", spec[1]),)
    if kind == "zcity":
        return (("mz", spec[1]), ("city", spec[3]))
    return ()


class Drawer:
    """An endless stream of specifications, decided by `seed`.

    Only Random.random() is used: Python promises its sequence for a seed across versions.
    """

    def __init__(self, seed: int):
        self._random = Random(seed).random
        self._atoms = inventory()
        everyday = current_currencies()
        self._currencies = [code for _, code in self._atoms["cur"]]
        self._tender = [code for code in self._currencies if code in everyday]
        patterns = own_data("en")["unit_patterns"]
        self._units = sorted(patterns)
        self._pers = [unit for unit in self._units if find(patterns, unit, "long", "per")]
        self._make: dict[str, Callable[[], Spec]] = {
            "atom": lambda: self._choose(self._atoms[_ATOM(self._random())]),
            "qty": lambda: ("qty", self._choose(self._units), self._number()),
            "rate": self._rate,
            "money": self._money,
            "ago": self._ago,
            "date": lambda: ("date", self._choose(_DATES), self._day()),
            "at": lambda: ("at", self._choose(_DATES[:3]), self._day(), self._count(1440) - 1),
            "span": self._span,
            "big": lambda: ("big", self._count(999), 3 * (1 + self._count(3))),
            "zcity": lambda: (
                "zcity", *self._choose(self._atoms["mz"])[1:], self._choose(self._atoms["city"])[1]
            ),
            "dur": self._durations,
            "list1": self._list_of_atoms,
            "listq": lambda: self._list(lambda: self._one(_QUANTITY), 3),
            "listm": lambda: self._list(lambda: self._one(_MIXED), 3),
        }  # fmt: skip

    def draw(self) -> Spec:
        """Returns the next specification."""
        return self._one(_CATEGORY)

    def _one(self, kind: Callable[[float], str]) -> Spec:
        return self._make[kind(self._random())]()

    def _choose(self, options: Sequence):
        return options[int(self._random() * len(options))]

    def _count(self, most: int) -> int:
        return 1 + int(self._random() * most)

    def _number(self) -> int | str:
        size = self._random()
        if size < 0.60:
            return self._count(20)
        if size < 0.90:
            return self._count(100)
        if size < 0.96:
            return self._count(10_000)
        return f"{self._count(20)}.{self._count(9)}"

    def _day(self) -> int:
        return _FIRST_DAY + int(self._random() * _DAYS)

    def _rate(self) -> Spec:
        unit, per = self._choose(self._units), self._choose(self._pers)
        return ("rate", unit, self._number(), per)

    def _money(self) -> Spec:
        # Three of four in money that one can pay with today; the tables are full of history.
        currencies = self._tender if self._random() < 0.75 else self._currencies
        return ("money", self._choose(currencies), self._number())

    def _ago(self) -> Spec:
        direction = "past" if self._random() < 0.5 else "future"
        return ("ago", self._choose(_FIELDS), direction, self._count(40))

    def _span(self) -> Spec:
        """Draws two days of one year, months apart where the skeleton has no day."""
        skeleton = self._choose(_SPANS)
        days = self._count(28) if skeleton.endswith("d") else 31 + self._count(300)
        start = self._day()
        end = start + days
        if "y" not in skeleton and date.fromordinal(start).year != date.fromordinal(end).year:
            start, end = start - days, start  # without a year the year must not change
        return ("span", skeleton, start, end)

    def _durations(self) -> Spec:
        count = 2 + int(self._random() * 2)
        first = int(self._random() * (len(_DURATIONS) - count + 1))
        units = _DURATIONS[first : first + count]
        items = tuple(("qty", f"duration-{unit}", self._count(30)) for unit in units)
        return ("list", "standard", items)

    def _list_of_atoms(self) -> Spec:
        options = self._atoms[_LISTED(self._random())]
        return self._list(lambda: self._choose(options), 4)

    def _list(self, make: Callable[[], Spec], most: int) -> Spec:
        """Draws 2 to `most` different items, joined by `and`, one time in four by `or`."""
        style = "or" if self._random() < 0.25 else "standard"
        items: list[Spec] = []
        count = min(most, _LENGTH(self._random()))
        while len(items) < count:
            item = make()
            if item not in items:
                items.append(item)
        return ("list", style, tuple(items))
