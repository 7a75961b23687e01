"""Writes dates, times and intervals by a locale's own patterns (LDML part 4)."""

import datetime
import unicodedata

from babel.dates import parse_pattern, tokenize_pattern

from m4.data.cldr.tables import Tables, find, own_names, root_data

# Places in the tuple of moment().
YEAR, MONTH, DAY, WEEKDAY, QUARTER, MINUTE_OF_DAY, HOUR, HOUR12, MINUTE, HALF = range(10)
Moment = tuple[int, ...]
# A pattern: literal text, or the index of a value and the table of its texts.
Part = str | tuple[int, dict[int, str]]

WIDTHS = {3: "abbreviated", 4: "wide", 5: "narrow", 6: "short"}
NUMERIC = {"y": YEAR, "d": DAY, "H": HOUR, "h": HOUR12, "m": MINUTE, "M": MONTH, "L": MONTH}
NAMED = {
    "M": ("months", "format", MONTH, range(1, 13)),
    "L": ("months", "stand-alone", MONTH, range(1, 13)),
    "E": ("days", "format", WEEKDAY, range(7)),
    "c": ("days", "stand-alone", WEEKDAY, range(7)),
    "Q": ("quarters", "format", QUARTER, range(1, 5)),
    "q": ("quarters", "stand-alone", QUARTER, range(1, 5)),
}


def moment(ordinal: int, minute_of_day: int = 0) -> Moment:
    """Returns the values that patterns name; `ordinal` is that of datetime.date.fromordinal."""
    day = datetime.date.fromordinal(ordinal)
    hour, minute = divmod(minute_of_day, 60)
    return (
        day.year,
        day.month,
        day.day,
        (ordinal + 6) % 7,  # Monday 0
        (day.month + 2) // 3,
        minute_of_day,
        hour,
        hour % 12 or 12,
        minute,
        hour // 12,
    )


def native_digits(system: str | None) -> dict[int, str] | None:
    """Returns a str.translate table from 0-9 to the digits of a numbering system, or None.

    Unicode gives a script's ten digits one run of code points from its zero.
    """
    if system in (None, "latn"):
        return None
    zeros = {
        "arab": "ARABIC-INDIC DIGIT ZERO",
        "arabext": "EXTENDED ARABIC-INDIC DIGIT ZERO",
        "beng": "BENGALI DIGIT ZERO",
        "deva": "DEVANAGARI DIGIT ZERO",
        "mymr": "MYANMAR DIGIT ZERO",
    }
    assert system in zeros, f"numbering system {system} is new in this CLDR: name its zero here"
    zero = ord(unicodedata.lookup(zeros[system]))
    return {ord("0") + digit: chr(zero + digit) for digit in range(10)}


class _Numbers(dict[int, str]):
    """Value -> its digits, padded to `width` (a width of 2 cuts years), made when needed."""

    def __init__(self, width: int, year: bool, digits: dict[int, str] | None):
        super().__init__()
        self.width, self.year, self.digits = width, year, digits

    def __missing__(self, value: int) -> str:
        text = f"{value:0{self.width}d}"
        if self.year and self.width == 2:
            text = text[-2:]
        self[value] = text = text.translate(self.digits) if self.digits else text
        return text


class Calendar:
    """The date and time patterns of one locale; texts with a missing name are None.

    Where a locale has its own formats, those it lacks are root's: CLDR leaves out what equals
    root, and patterns have no words. The names in them (months, AM and PM) are never root's.
    """

    def __init__(self, own: Tables, digits: dict[int, str] | None):
        self._own = own
        self._digits = digits
        self._dates = {**_patterns(own, "datetime_skeletons"), **_patterns(own, "date_formats")}
        self._times = _patterns(own, "time_formats")
        self._intervals = _patterns(own, "interval_formats")
        self._compiled: dict[str, list[Part] | None] = {}
        self._periods = own_names(own, "day_periods", "format", "abbreviated") or {}

    def date(self, name: str, when: Moment) -> str | None:
        """Writes a day by a format's name ('full', 'long', 'medium') or a skeleton ('yMMMEd')."""
        return self._apply(self._dates.get(name), when)

    def time(self, when: Moment) -> str | None:
        """Writes the time of day, hours and minutes."""
        return self._apply(self._times.get("short"), when)

    def interval(self, skeleton: str, start: Moment, end: Moment) -> str | None:
        """Writes two days with their common parts once (LDML part 4, intervalFormats)."""
        formats = self._intervals.get(skeleton) or {}
        for field, index in (("y", YEAR), ("M", MONTH), ("d", DAY)):
            if start[index] != end[index]:
                if field not in formats:
                    return None
                if len(formats[field]) != 2:  # Babel could not split the pattern
                    return None
                # Babel writes the neighbours 'de' 'su' as 'de ''su ' when it splits a pattern: an
                # apostrophe. CLDR has none in these patterns.
                first, second = (
                    self._apply(pattern.replace("''", ""), when)
                    for pattern, when in zip(formats[field], (start, end), strict=True)
                )
                return None if first is None or second is None else first + second
        return None

    def _apply(self, pattern: object, when: Moment) -> str | None:
        if pattern is None:
            return None
        text = pattern if isinstance(pattern, str) else pattern.pattern  # type: ignore[attr-defined]
        if text not in self._compiled:
            self._compiled[text] = self._compile(text)
        parts = self._compiled[text]
        if parts is None:
            return None
        return "".join(
            [part if isinstance(part, str) else part[1][when[part[0]]] for part in parts]
        )

    def _compile(self, pattern: str) -> list[Part] | None:
        parts: list[Part] = []
        for _, value in tokenize_pattern(parse_pattern(pattern).pattern):
            part = value if isinstance(value, str) else self._field(str(value[0]), int(value[1]))
            if part is None:
                return None
            parts.append(part)
        return parts

    def _field(self, char: str, count: int) -> Part | None:
        if char == "G":
            names = own_names(self._own, "eras", WIDTHS[max(3, count)])
            return names[1] if names and 1 in names else None  # every year here is after Christ
        if char in ("a", "B"):
            return self._period(char)
        if char in NUMERIC and (count < 3 or char not in NAMED):
            return NUMERIC[char], _Numbers(count, char == "y", self._digits)
        if char in NAMED and (count >= 3 or char == "E"):
            table, context, index, keys = NAMED[char]
            names = own_names(self._own, table, context, WIDTHS[max(3, count)])
            return (index, names) if names and all(key in names for key in keys) else None
        return None  # zones, week numbers: not in the formats used here

    def _period(self, char: str) -> Part | None:
        if char == "a":
            return _table(HALF, [self._periods.get(half) for half in ("am", "pm")])
        rules = find(self._own, "day_period_rules", None)
        if not rules:
            return None
        names = [self._periods.get(_period_at(rules, minute * 60)) for minute in range(1440)]
        return _table(MINUTE_OF_DAY, names)


def _patterns(own: Tables, name: str) -> dict:
    patterns = own.get(name)
    return {**root_data()[name], **patterns} if patterns else {}


def _table(index: int, names: list[str | None]) -> Part | None:
    table = {value: name for value, name in enumerate(names) if name is not None}
    return (index, table) if len(table) == len(names) else None


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
