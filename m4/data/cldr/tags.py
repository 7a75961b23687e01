"""Language tags (BCP 47): their parts, likely script and English names, from CLDR's tables."""

import re
from functools import lru_cache
from typing import NamedTuple

from babel import core, localedata

from m4.data.cldr.tables import own_data


class Tag(NamedTuple):
    """Parts of a tag: 'zh', 'Hant', 'TW' of 'zh-hant-TW'; '' where the tag leaves one open.

    `variants` are further parts that CLDR knows, such as 'valencia'.
    """

    language: str
    script: str = ""
    territory: str = ""
    variants: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns the tag as CLDR writes it: 'zh_Hant_TW'."""
        return "_".join(filter(None, (self.language, self.script, self.territory, *self.variants)))


@lru_cache(maxsize=4096)
def parse(code: str) -> Tag | None:
    """Returns the parts of a code, or None if CLDR does not know one of them.

    Old codes are replaced ('iw' -> 'he', 'sh' -> 'sr_Latn', 'tl' -> 'fil'); '-', '_' and case do
    not matter. A script may be its English name, as gettext writes it: 'sr_latin'.
    """
    first, *rest = re.split("[-_@]", code)
    known = core.get_global("language_aliases").get(first.lower(), first.lower())
    language, *implied = known.split("_")
    if language not in names("languages") and language not in core.get_global("likely_subtags"):
        return None
    script = territory = ""
    variants = []
    for part in [*rest, *implied]:
        if found := _script(part):
            script = script or found
        elif len(part) in (2, 3) and part.upper() in names("territories"):
            territory = territory or part.upper()
        elif part.upper() in names("variants"):
            variants.append(part.lower())
        else:
            return None
    return Tag(language, script, territory, tuple(variants))


def likely_script(tag: Tag) -> str:
    """Returns the likely script: 'kab' -> 'Latn', 'pa_PK' -> 'Arab'; '' if CLDR has none."""
    likely = core.get_global("likely_subtags")
    of_territory = likely.get(f"{tag.language}_{tag.territory}")
    _, script, *_ = [*(of_territory or likely.get(tag.language, "")).split("_"), "", ""]
    return tag.script or script


@lru_cache(maxsize=8)
def names(kind: str) -> dict[str, str]:
    """Returns code -> English name of languages, scripts, territories or variants."""
    return own_data("en")[kind]


@lru_cache(maxsize=4096)
def own_name(tag: Tag) -> str:
    """Returns a language's own name: 'العربية' for 'ar'; '' where CLDR has no locale of it."""
    for code in (f"{tag.language}_{tag.script}", tag.language):
        if localedata.exists(code):
            found = own_data(code).get("languages", {})
            return found.get(code) or found.get(tag.language, "")
    return ""


def additions(tag: Tag) -> str:
    """Returns the part of a name in brackets: 'Traditional, Taiwan' for 'zh_Hant_TW'."""
    script = names("scripts").get(tag.script, tag.script)
    territory = names("territories").get(tag.territory, "")
    variants = [names("variants")[one.upper()] for one in tag.variants]
    return ", ".join(filter(None, (script, territory, *variants)))


@lru_cache(maxsize=1024)
def _script(part: str) -> str:
    """Returns the code of a script: 'hant' -> 'Hant', 'latin' -> 'Latn', else ''."""
    named = {name.lower(): script for script, name in names("scripts").items()}
    code = part.title() if len(part) == 4 else ""
    return code if code in names("scripts") else named.get(part.lower(), "")
