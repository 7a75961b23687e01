"""The script that a language is most likely written in: CLDR's likely subtags."""

from __future__ import annotations

from functools import lru_cache

from babel import core


@lru_cache(maxsize=1)
def _scripts() -> dict[str, str]:
    """Language -> script, for the languages of CLDR and for ISO 639-3 codes of the same ones."""
    scripts = {}
    for language, full in core.get_global("likely_subtags").items():
        if language.isalpha() and language.islower() and len(parts := full.split("_")) > 1:
            scripts[language] = parts[1]
    for alias, language in core.get_global("language_aliases").items():
        if language in scripts:
            scripts.setdefault(alias, scripts[language])
    return scripts


def likely_script(code: str) -> str | None:
    """'kab' -> 'Latn', 'xal' -> 'Cyrl'; None where CLDR does not know the language."""
    return _scripts().get(code)
