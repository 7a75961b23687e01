"""Renders specifications (m4/data/cldr/specs.py) as texts of one locale."""

import re
from decimal import Decimal
from functools import lru_cache

from babel.plural import PluralRule

from m4.data.cldr.calendar import Calendar, moment, native_digits
from m4.data.cldr.tables import Tables, find, own_data, root_data

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
        self._digits = native_digits(system)
        self._calendar = Calendar(own, self._digits)
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
            "ago": self._ago,
            "date": lambda name, day: self._calendar.date(name, moment(day)),
            "at": self._at,
            "span": lambda name, a, b: self._calendar.interval(name, moment(a), moment(b)),
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
            text = text.translate(self._digits) if self._digits else text
            self._numbers[value] = text, self._plural(Decimal(value))
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

    def _ago(self, field: str, direction: str, count: int) -> str | None:
        return self._counted(find(self._own, "date_fields", field, direction), count)

    def _at(self, name: str, day: int, minute: int) -> str | None:
        when = moment(day, minute)
        date, time = self._calendar.date(name, when), self._calendar.time(when)
        if not date or not time:
            return None
        # In the glue, as in all date patterns, quotes keep letters from being fields: {1} 'a' {0}.
        glue = (find(self._own, "datetime_formats", name) or "{1} {0}").replace("'", "")
        return glue.replace("{1}", date).replace("{0}", time)

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


@lru_cache(maxsize=1)
def english() -> Phrases:
    """Returns the English phrases, one object for all, so that each is rendered once."""
    return Phrases("en")


@lru_cache(maxsize=4)
def phrases(code: str) -> Phrases:
    """Returns the phrases of a locale; the last few are kept (its tables take 10-60 ms)."""
    return Phrases(code)
