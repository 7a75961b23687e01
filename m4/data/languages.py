"""Languages: the 137 of the embedded corpus, ordered by size there, and others from CLDR."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from m4.data.cldr import tags
from m4.data.directions import base_language


@dataclass(frozen=True)
class Language:
    """A language, under m4's code."""

    code: str
    iso639_3: str  # ISO 639-3 code
    name: str
    script: str
    branch: str


def _lines(name: str) -> list[str]:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()


def _families() -> dict[str, str]:
    """Returns base language -> family, for reports."""
    families, family = {}, ""
    for line in _lines("families.txt"):
        name, bar, codes = line.rpartition("|")
        family = name if bar else family
        families |= dict.fromkeys(codes.split() if line[0] != "#" else (), family)
    return families


_ROWS = (line.split("|") for line in _lines("languages.txt")[1:])
LANGUAGES = {code: Language(code, *more) for code, *more in _ROWS}
_FAMILIES = _families()
OTHER = "other"  # family of all other languages

# Languages whose texts in CLDR are nearly equal: a third to nearly all of the renderings are
# identical, so a high score in one says little if the model is trained on the other.
_GROUPS = (("nb", "nn"), ("hr", "bs", "sr_Latn"), ("hsb", "dsb"))
_ISO = {
    code: language
    for language in reversed(LANGUAGES.values())
    for code in (language.iso639_3, f"{language.iso639_3}_{language.script}")
}
_BY_SCRIPT = {(code.split("_")[0], known.script): known for code, known in LANGUAGES.items()}
_BY_SCRIPT["ko", "Kore"] = LANGUAGES["ko"]  # CLDR's name for Hangul with Chinese characters
# A macrolanguage that CLDR distinguishes from the intended language.
_MEANT = {"no": "nb"}


def listed(code: str) -> Language | None:
    """Returns the language of m4's table with this m4 or ISO 639-3 code ('srp_Latn'), or None."""
    return LANGUAGES.get(code) or _ISO.get(code)


@lru_cache(maxsize=4096)
def describe(code: str) -> Language:
    """Returns the language of a code.

    The code may be m4's, ISO 639-3's, or any BCP 47 tag with '-' or '_' ('pt_BR', 'zh-Hant',
    'kab'), for which CLDR knows name and likely script. An unknown code, such as a user's own, is
    its own name. The result's `code` is that of the table or of CLDR; it is not a key.
    """
    if origin := code.partition("~")[2]:
        known = describe(base_language(code))
        return replace(known, name=f"{known.name} ({origin})")
    if known := listed(code):
        return known
    if (tag := tags.parse(code)) is None:
        return Language(code, code, code, "", "")
    tag = tag._replace(language=_MEANT.get(tag.language, tag.language))
    same = _BY_SCRIPT.get((tag.language, tags.likely_script(tag)))
    if same and not tag.territory and not tag.variants:
        return same
    base = LANGUAGES.get(tag.language)
    script = same.script if same else tags.likely_script(tag)
    names = tags.names("languages")  # a language without ISO 639-1 code
    name = base.name.split(" (")[0] if base else names.get(tag.language, tag.language)
    more = tags.additions(tag)
    return Language(
        str(tag),
        base.iso639_3 if base else tag.language,
        f"{name} ({more})" if more else name,
        script,
        base.branch if base else "",
    )


def title_of(key: str) -> str:
    """Returns the name of a pair: 'Galician' for 'gl' (with English), 'French–Wolof' of 'fr-wo'."""
    return "–".join(describe(code).name for code in key.split("-"))


def is_english(code: str) -> bool:
    """Returns whether a code is English or a variant of it: 'en', 'eng', 'en_GB'."""
    tag = tags.parse(base_language(code))
    return tag is not None and tag.language == "en"


def split_code(code: str) -> tuple[str, str]:
    """Splits a code: 'zh_Hant_TW' -> ('zh', 'Hant'), but 'zh_TW' -> ('zh', ''), without script."""
    language, _, rest = code.partition("_")
    return language, rest[:4] if re.match(r"[A-Z][a-z]{3}(_|$)", rest) else ""


def closely_related(code: str, among: Iterable[str]) -> list[str]:
    """Returns the languages in `among` whose texts nearly equal those of `code`.

    They are in one of `_GROUPS`, or the same language in the same script ('pt' and 'pt_BR').
    """
    base = base_of(code)
    group = next((group for group in _GROUPS if base in group), (base,))
    return [other for other in among if other != code and base_of(other) in group]


def base_of(code: str) -> str:
    """Returns a code without territory: 'sr_Latn' for 'sr_Latn_RS'."""
    known = describe(code)
    if not known.script:
        return code
    language = known.code.split("_")[0]
    same = _BY_SCRIPT.get((language, known.script))
    return same.code if same else f"{language}_{known.script}"


def family_of(code: str) -> str:
    """Returns the family of a code's base language, or 'other': 'Romance' for 'glg', 'gl_ES'."""
    base = describe(code).code.split("_")[0]
    return _FAMILIES.get(base) or _FAMILIES.get(code.split("_")[0], OTHER)


def shown_families(codes: Iterable[str], most: int) -> dict[str, str]:
    """Returns code -> family, one of the `most` largest families, in order, or 'other'."""
    family = {code: family_of(code) for code in codes}
    counts = Counter(name for name in family.values() if name != OTHER)
    kept = sorted(counts, key=lambda name: (-counts[name], name))[:most]
    order = {name: rank for rank, name in enumerate(kept)}
    named = {code: name if name in order else OTHER for code, name in family.items()}
    return dict(sorted(named.items(), key=lambda item: order.get(item[1], most)))
