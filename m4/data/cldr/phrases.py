"""Renders specifications (m4/data/sources/cldr.py) as texts of one locale.

Dates, times and intervals are written by the locale's own patterns (LDML part 4).
"""

import re
import unicodedata
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from functools import lru_cache

from babel.dates import parse_pattern, tokenize_pattern
from babel.plural import PluralRule

from m4.data.cldr.tables import Tables, find, own_data, own_names, root_data

# A specification is a tuple tree: ("qty", "length-meter", 17), ("list", "or", (spec, spec)).
Spec = tuple
MEMO_LIMIT = 20_000

# Spaces that a tokeniser or BLEU would take for letters become spaces; marks that only steer the
# display of bidirectional text, soft hyphens and word joiners go. ZWJ and ZWNJ are spelling: kept.
_MARKS = (0xAD, 0x61C, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), 0x2060)
_NORMAL: dict[int, str | None] = {
    **dict.fromkeys((0xA0, *range(0x2000, 0x200B), 0x202F, 0x3000), " "),
    **dict.fromkeys((*_MARKS, *range(0x2066, 0x206A), 0xFEFF)),
}
_SPACES = re.compile(r"\s{2,}")


def normalise(text: str) -> str:
    """Returns a text with plain spaces and without bidirectional marks and outer spaces."""
    return _SPACES.sub(" ", text.translate(_NORMAL)).strip()


class Phrases:
    """Renders specifications in one locale, from the locale's own data only.

    Numbers are written with the digits of the locale's default numbering system (Babel leaves them
    ASCII): fa, ps, bn, as, mr, ne, my, sd and ckb have their own.
    """

    def __init__(self, code: str):
        self.code = code
        own = own_data(code)
        self._own = own
        self._plural = own.get("plural_form") or PluralRule({})
        system = own.get("default_numbering_system") or "latn"
        self._digits = _native_digits(system)
        self._calendar = _Calendar(own, self._digits)
        self._decimal = _symbol(own, system, "decimal")
        self._group = _symbol(own, system, "group")
        pattern = find(own, "decimal_formats", None) or find(root_data(), "decimal_formats", None)
        self._groups: tuple[int, int] = pattern.grouping
        self._numbers: dict[int | str, tuple[str, str]] = {}
        self._memo: dict[Spec, str | None] = {}
        self._render = {
            "terr": lambda code: find(own, "territories", code),
            "lang": lambda code: find(own, "languages", code),
            "script": lambda code: find(own, "scripts", code),
            "cur": lambda code: find(own, "currency_names", code),
            "city": self._city,
            "mz": lambda zone, kind: find(own, "meta_zones", zone, "long", kind),
            "uname": self._unit_name,
            "qty": self._quantity,
            "rate": self._rate,
            "money": self._money,
            "ago": lambda field, of, n: self._counted(find(own, "date_fields", field, of), n),
            "date": lambda name, day: self._calendar.date(name, datetime.fromordinal(day)),
            "at": self._at,
            "span": self._span,
            "big": self._big,
            "zcity": self._zone_city,
        }

    def render(self, spec: Spec) -> str | None:
        """Returns the text of `spec`, or None where the locale lacks own data for a part of it."""
        if spec[0] == "list":
            return self._list(spec[1], spec[2])
        memo = self._memo
        if spec in memo:
            return memo[spec]
        text = self._render[spec[0]](*spec[1:])
        if len(memo) >= MEMO_LIMIT:
            memo.clear()
        memo[spec] = text = normalise(text) if text else None
        return text

    def _list(self, style: str, items: tuple[Spec, ...]) -> str | None:
        own = find(self._own, "list_patterns", style)
        if not own:
            return None
        texts = [text for item in items if (text := self.render(item))]
        if len(texts) < len(items):
            return None
        # Parts that equal root's are left out of CLDR's files; root's `end` is no word of theirs.
        patterns = {**find(root_data(), "list_patterns", style), **own}
        if style == "or" and not {"2", "end"} <= own.keys():
            return None
        kinds = ["2"] if len(texts) == 2 else ["start", *["middle"] * (len(texts) - 3), "end"]
        text = texts[0]
        for kind, item in zip(kinds, texts[1:], strict=True):
            text = patterns[kind].replace("{0}", text).replace("{1}", item)
        return normalise(text)

    def _city(self, zone: str) -> str | None:
        city = find(self._own, "time_zones", zone, "city")
        if city or self.code != "en":
            return city
        # CLDR's rule for what English (so root) does not name: the last part of the identifier.
        root = find(root_data(), "time_zones", zone, "city")
        return root or zone.rpartition("/")[2].replace("_", " ")

    def _unit_name(self, unit: str) -> str | None:
        # Here and in _unit_forms: CLDR leaves out the long texts that equal the short ones.
        widths = find(self._own, "unit_display_names", unit) or {}
        return widths.get("long") or widths.get("short")

    def _unit_forms(self, unit: str) -> dict[str, str]:
        widths = find(self._own, "unit_patterns", unit) or {}
        long = widths.get("long") or {}
        return long if "other" in long else {**(widths.get("short") or {}), **long}

    def _number(self, value: int | str) -> tuple[str, str]:
        """Returns a number's text and its plural category; decimals are strings, '2.5'."""
        if value not in self._numbers:
            whole, _, part = str(value).partition(".")
            primary, secondary = self._groups
            head, tail = whole[:-primary], whole[-primary:]
            while head:
                head, tail = head[:-secondary], head[-secondary:] + self._group + tail
            text = tail + (self._decimal + part if part else "")
            self._numbers[value] = text.translate(self._digits), self._plural(Decimal(value))
        return self._numbers[value]

    def _counted(self, forms: dict | None, value: int | str) -> str | None:
        if not forms:
            return None
        text, category = self._number(value)
        pattern = forms.get(category) or forms.get("other")
        return pattern and pattern.replace("{0}", text)

    def _quantity(self, unit: str, value: int | str) -> str | None:
        return self._counted(self._unit_forms(unit), value)

    def _rate(self, unit: str, value: int | str, per: str) -> str | None:
        amount = self._quantity(unit, value)
        pattern = self._unit_forms(per).get("per")
        return amount and pattern and pattern.replace("{0}", amount)

    def _money(self, currency: str, value: int | str) -> str | None:
        text, category = self._number(value)
        forms = find(self._own, "currency_names_plural", currency) or {}
        # CLDR leaves out the plural forms that equal the name ("lateral inheritance").
        name = forms.get(category) or forms.get("other")
        name = name or find(self._own, "currency_names", currency)
        glue = find(self._own, "currency_unit_patterns") or {}
        pattern = glue.get(category) or glue.get("other") or "{0} {1}"
        return name and pattern.replace("{0}", text).replace("{1}", name)

    def _at(self, name: str, day: int, minute: int) -> str | None:
        when = datetime.fromordinal(day) + timedelta(minutes=minute)
        date, time = self._calendar.date(name, when), self._calendar.time(when)
        if not date or not time:
            return None
        # In the glue, as in all date patterns, quotes keep letters from being fields: {1} 'a' {0}.
        glue = (find(self._own, "datetime_formats", name) or "{1} {0}").replace("'", "")
        return glue.replace("{1}", date).replace("{0}", time)

    def _span(self, skeleton: str, *days: int) -> str | None:
        return self._calendar.interval(skeleton, *map(datetime.fromordinal, days))

    def _big(self, digits: int, zeros: int) -> str | None:
        """Writes `digits` (1-999) followed by `zeros` zeros, in words: 5 million."""
        forms = find(self._own, "compact_decimal_formats", "long")
        if not forms:
            return None
        value = digits * 10**zeros
        key = str(10 ** (len(str(value)) - 1))
        pattern = find(forms, "other", key)
        if pattern is None:
            return None
        # "00 million" says two of the value's digits; a language that counts otherwise (in lakhs)
        # would have to round some values: those are no translations.
        shown, rest = divmod(value, 10 ** (len(key) - pattern.int_prec[0]))
        if rest:
            return None
        text, category = self._number(shown)
        pattern = find(forms, category, key) or pattern
        affixes = pattern.prefix[0], pattern.suffix[0]
        return f"{affixes[0]}{text}{affixes[1]}" if any(affixes) else None

    def _zone_city(self, zone: str, kind: str, city_zone: str) -> str | None:
        name, city = self.render(("mz", zone, kind)), self.render(("city", city_zone))
        if not name or not city:
            return None
        pattern = find(self._own, "zone_formats", "fallback") or "%(1)s (%(0)s)"
        return pattern % {"0": city, "1": name}


def _symbol(own: Tables, system: str, name: str) -> str:
    """Returns a number symbol; CLDR leaves out those that equal root's."""
    for kind in (system, "latn"):
        for tables in (own, root_data()):
            symbol = find(tables, "number_symbols", kind, name)
            if symbol:
                return symbol
    raise AssertionError(f"root has no {name} symbol")


# A pattern: literal text, or what writes a field of a day and its time.
_Part = str | Callable[[datetime], str]

_WIDTHS = {3: "abbreviated", 4: "wide", 5: "narrow", 6: "short"}
_NUMERIC: dict[str, Callable[[datetime], int]] = {
    "y": lambda when: when.year,
    "M": lambda when: when.month,
    "L": lambda when: when.month,
    "d": lambda when: when.day,
    "H": lambda when: when.hour,
    "h": lambda when: when.hour % 12 or 12,
    "m": lambda when: when.minute,
}
# Field -> table and context of its names, its key in them, and all keys.
_NAMED: dict[str, tuple[str, str, Callable[[datetime], int], range]] = {
    "M": ("months", "format", lambda when: when.month, range(1, 13)),
    "L": ("months", "stand-alone", lambda when: when.month, range(1, 13)),
    "E": ("days", "format", datetime.weekday, range(7)),
    "c": ("days", "stand-alone", datetime.weekday, range(7)),
    "Q": ("quarters", "format", lambda when: (when.month + 2) // 3, range(1, 5)),
    "q": ("quarters", "stand-alone", lambda when: (when.month + 2) // 3, range(1, 5)),
}


def _native_digits(system: str) -> dict[int, str]:
    """Returns a str.translate table from 0-9 to the digits of a numbering system.

    Unicode gives a script's ten digits one run of code points from its zero.
    """
    if system == "latn":
        return {}
    scripts = {
        "arab": "ARABIC-INDIC", "arabext": "EXTENDED ARABIC-INDIC", "beng": "BENGALI",
        "deva": "DEVANAGARI", "mymr": "MYANMAR",
    }  # fmt: skip
    assert system in scripts, f"numbering system {system} is new in this CLDR: name it here"
    zero = ord(unicodedata.lookup(f"{scripts[system]} DIGIT ZERO"))
    return {ord("0") + digit: chr(zero + digit) for digit in range(10)}


class _Calendar:
    """The date and time patterns of one locale; texts with a missing name are None.

    Where a locale has its own formats, those it lacks are root's: CLDR leaves out what equals
    root, and patterns have no words. The names in them (months, AM and PM) are never root's.
    """

    def __init__(self, own: Tables, digits: dict[int, str]):
        self._own = own
        self._digits = digits
        self._dates = {**_patterns(own, "datetime_skeletons"), **_patterns(own, "date_formats")}
        self._times = _patterns(own, "time_formats")
        self._intervals = _patterns(own, "interval_formats")
        self._compiled: dict[str, list[_Part] | None] = {}
        self._periods = own_names(own, "day_periods", "format", "abbreviated") or {}

    def date(self, name: str, when: datetime) -> str | None:
        """Writes a day by a format's name ('full', 'long', 'medium') or a skeleton ('yMMMEd')."""
        return self._apply(self._dates.get(name), when)

    def time(self, when: datetime) -> str | None:
        """Writes the time of day, hours and minutes."""
        return self._apply(self._times.get("short"), when)

    def interval(self, skeleton: str, start: datetime, end: datetime) -> str | None:
        """Writes two days with their common parts once (LDML part 4, intervalFormats)."""
        formats = self._intervals.get(skeleton) or {}
        fields = {"y": start.year != end.year, "M": start.month != end.month, "d": start != end}
        largest = next((field for field, differs in fields.items() if differs), "")
        if len(patterns := formats.get(largest, ())) != 2:  # Babel could not split the pattern
            return None
        # Babel writes the neighbours 'de' 'su' as 'de ''su ' when it splits a pattern: an
        # apostrophe. CLDR has none in these patterns.
        first, second = (
            self._apply(pattern.replace("''", ""), when)
            for pattern, when in zip(patterns, (start, end), strict=True)
        )
        return None if first is None or second is None else first + second

    def _apply(self, pattern: object, when: datetime) -> str | None:
        if pattern is None:
            return None
        text = pattern if isinstance(pattern, str) else pattern.pattern  # type: ignore[attr-defined]
        if text not in self._compiled:
            self._compiled[text] = self._compile(text)
        if (parts := self._compiled[text]) is None:
            return None
        return "".join([part if isinstance(part, str) else part(when) for part in parts])

    def _compile(self, pattern: str) -> list[_Part] | None:
        parts: list[_Part] = []
        for _, value in tokenize_pattern(parse_pattern(pattern).pattern):
            part = value if isinstance(value, str) else self._field(str(value[0]), int(value[1]))
            if part is None:
                return None
            parts.append(part)
        return parts

    def _field(self, char: str, count: int) -> _Part | None:
        if char == "G":
            names = own_names(self._own, "eras", _WIDTHS[max(3, count)])
            return names[1] if names and 1 in names else None  # every year here is after Christ
        if char in ("a", "B"):
            return self._period(char)
        if char in _NUMERIC and (count < 3 or char not in _NAMED):
            value_of = _NUMERIC[char]
            start = -2 if char == "y" and count == 2 else None  # yy: a year's last two digits
            digits = self._digits
            return lambda when: f"{value_of(when):0{count}d}"[start:].translate(digits)
        if char in _NAMED and (count >= 3 or char == "E"):
            table, context, key_of, keys = _NAMED[char]
            names = own_names(self._own, table, context, _WIDTHS[max(3, count)])
            if names and all(key in names for key in keys):
                return lambda when: names[key_of(when)]
        return None  # zones, week numbers: not in the formats used here

    def _period(self, char: str) -> _Part | None:
        if char == "a":
            names = [self._periods.get(half) for half in ("am", "pm")]
            return None if None in names else lambda when: names[when.hour // 12]  # type: ignore
        rules = find(self._own, "day_period_rules", None) or {}
        names = [self._periods.get(_period_at(rules, minute * 60)) for minute in range(1440)]
        return None if None in names else lambda when: names[when.hour * 60 + when.minute]  # type: ignore


def _patterns(own: Tables, name: str) -> dict:
    patterns = own.get(name)
    return {**root_data()[name], **patterns} if patterns else {}


def _period_at(rules: dict, second: int) -> str | None:
    """Returns the day period of a second; `at` rules go first, periods may cross midnight."""
    within = None
    for name, spans in rules.items():
        for span in spans:
            if span.get("at") == second:
                return name
            if "from" in span:
                length = (span["before"] - span["from"]) % 86400
                if (second - span["from"]) % 86400 < length:
                    within = name
    return within


@lru_cache(maxsize=1)
def english() -> Phrases:
    """Returns the English phrases, one object for all, so that each is rendered once."""
    return Phrases("en")


@lru_cache(maxsize=4)
def phrases(code: str) -> Phrases:
    """Returns the phrases of a locale; the last few are kept (its tables take 10-60 ms)."""
    return Phrases(code)
