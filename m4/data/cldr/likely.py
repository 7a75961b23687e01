"""The script that a language is most likely written in: CLDR's likely subtags."""

from __future__ import annotations

import re
from functools import lru_cache

from babel import core


@lru_cache(maxsize=1)
def _scripts() -> dict[str, str]:
    """Code -> script, for the languages of CLDR, also in a territory ('zh_TW'), and for ISO 639-3
    codes of the same languages."""
    scripts = {}
    for code, full in core.get_global("likely_subtags").items():
        if re.fullmatch(r"[a-z]+(_[A-Z]{2})?", code) and len(parts := full.split("_")) > 1:
            scripts[code] = parts[1]
    for alias, language in core.get_global("language_aliases").items():
        if language in scripts:
            scripts.setdefault(alias, scripts[language])
    return scripts


def likely_script(code: str) -> str | None:
    """'kab' -> 'Latn', 'xal' -> 'Cyrl', 'zh_TW' -> 'Hant'; None where CLDR does not know the code,
    or knows nothing else of the territory than of the language ('zh_CN')."""
    return _scripts().get(code)
