"""Specifications of phrases and sentences, drawn without regard to any language.

A specification is a tuple tree of a kind and what it speaks of:

    atoms      ("terr", "ES") ("lang", "sc") ("script", "Latn") ("cur", "CHF")
               ("city", "Asia/Riyadh") ("mz", "Brasilia", "standard") ("uname", "length-meter")
    amounts    ("qty", unit, number) ("rate", unit, number, per) ("money", currency, number)
               ("big", 5, 6)  5 million
    times      ("ago", "week", "past", 3) ("date", format, day) ("at", format, day, minute)
               ("span", skeleton, day, day)  days as ordinals
    zones      ("zcity", zone, kind, city)
    lists      ("list", "standard" | "or", (spec, ...))  of durations, of one kind, mixed

Numbers are ints, or strings where they have decimals. By the weights below about half of the
sentences are lists, and digits about a tenth of the characters.
"""

import datetime
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import TypeVar

from m4.data.cldr.phrases import Spec, english
from m4.data.cldr.tables import current_currencies, find, own_data, zones

Atom = tuple[str, str]
Key = TypeVar("Key")

CATEGORIES = {
    "atom": 10, "qty": 6, "rate": 3, "money": 6, "ago": 4, "date": 6, "at": 6, "span": 4, "big": 1,
    "zcity": 5, "dur": 3, "list1": 24, "listq": 8, "listm": 13,
}  # fmt: skip
ATOMS = {"terr": 22, "lang": 22, "cur": 16, "city": 14, "uname": 11, "mz": 10, "script": 5}
LISTED = {"terr": 34, "lang": 30, "city": 14, "cur": 12, "uname": 6, "mz": 4, "script": 3}
LENGTHS = {2: 6, 3: 3, 4: 1}
QUANTITIES = {"qty": 5, "money": 4, "rate": 1}
MIXED = {"atom": 12, "qty": 3, "money": 3, "ago": 2, "date": 2, "at": 1, "span": 1, "zcity": 1}
DATES = (
    "full", "long", "medium", "MMMd", "MMMMd", "MMMEd", "yMMMM", "yMMMEd", "yQQQQ", "GyMMMd",
)  # fmt: skip
SPANS = ("MMMd", "MMMEd", "yMMM", "yMMMM", "yMMMd", "yMMMEd")
FIELDS = (
    "year", "quarter", "month", "week", "day", "hour", "minute", "second",
    "sun", "mon", "tue", "wed", "thu", "fri", "sat",
)  # fmt: skip
DURATIONS = ("year", "month", "week", "day", "hour", "minute", "second")
FIRST_DAY = datetime.date(1850, 1, 1).toordinal()
DAYS = datetime.date(2100, 1, 1).toordinal() - FIRST_DAY  # 91,310


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


def _picker(weights: dict[Key, int]) -> Callable[[float], Key]:
    names, edges = list(weights), list(accumulate(weights.values()))
    return lambda uniform: names[bisect(edges, uniform * edges[-1])]


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
        self._category = _picker(CATEGORIES)
        self._atom_kind = _picker(ATOMS)
        self._listed_kind = _picker(LISTED)
        self._quantity_kind = _picker(QUANTITIES)
        self._mixed_kind = _picker(MIXED)
        self._length = _picker(LENGTHS)
        self._make: dict[str, Callable[[], Spec]] = {
            "atom": lambda: self._choose(self._atoms[self._atom_kind(self._random())]),
            "qty": lambda: ("qty", self._choose(self._units), self._number()),
            "rate": self._rate,
            "money": self._money,
            "ago": self._ago,
            "date": lambda: ("date", self._choose(DATES), self._day()),
            "at": self._at,
            "span": self._span,
            "big": lambda: ("big", self._count(999), 3 * (1 + self._count(3))),
            "zcity": lambda: ("zcity", *self._choose(self._atoms["mz"])[1:], self._city()),
            "dur": self._durations,
            "list1": self._list_of_atoms,
            "listq": lambda: self._list(self._quantity, 3),
            "listm": lambda: self._list(self._phrase, 3),
        }

    def draw(self) -> Spec:
        """Returns the next specification."""
        return self._make[self._category(self._random())]()

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
        return FIRST_DAY + int(self._random() * DAYS)

    def _city(self) -> str:
        return self._choose(self._atoms["city"])[1]

    def _rate(self) -> Spec:
        unit, per = self._choose(self._units), self._choose(self._pers)
        return ("rate", unit, self._number(), per)

    def _money(self) -> Spec:
        # Three of four in money that one can pay with today; the tables are full of history.
        currencies = self._tender if self._random() < 0.75 else self._currencies
        return ("money", self._choose(currencies), self._number())

    def _ago(self) -> Spec:
        direction = "past" if self._random() < 0.5 else "future"
        return ("ago", self._choose(FIELDS), direction, self._count(40))

    def _at(self) -> Spec:
        name = self._choose(("full", "long", "medium"))
        return ("at", name, self._day(), int(self._random() * 1440))

    def _span(self) -> Spec:
        """Draws two days of one year, months apart where the skeleton has no day."""
        skeleton = self._choose(SPANS)
        days = self._count(28) if skeleton.endswith("d") else 31 + self._count(300)
        start = self._day()
        end = start + days
        if "y" not in skeleton and _year(start) != _year(end):
            start, end = start - days, start  # without a year the year must not change
        return ("span", skeleton, start, end)

    def _durations(self) -> Spec:
        count = 2 + int(self._random() * 2)
        first = int(self._random() * (len(DURATIONS) - count + 1))
        units = DURATIONS[first : first + count]
        items = tuple(("qty", f"duration-{unit}", self._count(30)) for unit in units)
        return ("list", "standard", items)

    def _quantity(self) -> Spec:
        return self._make[self._quantity_kind(self._random())]()

    def _phrase(self) -> Spec:
        return self._make[self._mixed_kind(self._random())]()

    def _list_of_atoms(self) -> Spec:
        options = self._atoms[self._listed_kind(self._random())]
        return self._list(lambda: self._choose(options), 4)

    def _list(self, make: Callable[[], Spec], most: int) -> Spec:
        """Draws 2 to `most` different items, joined by `and`, one time in four by `or`."""
        style = "or" if self._random() < 0.25 else "standard"
        items: list[Spec] = []
        count = min(most, self._length(self._random()))
        while len(items) < count:
            item = make()
            if item not in items:
                items.append(item)
        return ("list", style, tuple(items))


def _year(day: int) -> int:
    return datetime.date.fromordinal(day).year
