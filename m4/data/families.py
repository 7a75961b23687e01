"""Families of languages, for colours, filters and tables of reports."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from m4.data.languages import describe

OTHER = "other"


def _table() -> dict[str, str]:
    families, family = {}, ""
    text = Path(__file__).with_name("families.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        name, bar, codes = line.rpartition("|")
        family = name if bar else family
        families |= dict.fromkeys(codes.split() if line[0] != "#" else (), family)
    return families


_FAMILIES = _table()


def family_of(code: str) -> str:
    """Returns the family of a code, by its base language: 'Romance' for 'glg' and 'gl_ES'.

    It is 'other' for languages that the table does not have.
    """
    base = describe(code).code.split("_")[0]
    return _FAMILIES.get(base) or _FAMILIES.get(code.split("_")[0], OTHER)


def shown(codes: Iterable[str], most: int) -> dict[str, str]:
    """Returns code -> family for the `most` families with the most codes, and 'other'.

    The largest family comes first, 'other' last.
    """
    family = {code: family_of(code) for code in codes}
    counts = Counter(name for name in family.values() if name != OTHER)
    kept = sorted(counts, key=lambda name: (-counts[name], name))[:most]
    order = {name: rank for rank, name in enumerate(kept)}
    named = {code: name if name in order else OTHER for code, name in family.items()}
    return dict(sorted(named.items(), key=lambda item: order.get(item[1], most)))
