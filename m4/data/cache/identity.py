"""The identity of a corpus: everything that decides its token ids; and in what two differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from m4.data.sources import Source

# Raised whenever the same settings would give other files (test_format.py notices).
FORMAT = 6


def identity_of(source: Source, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings and text, as JSON."""
    text = json.loads(json.dumps(source.identity()))
    if "by_language" in text:  # files of other languages in the folder do not matter
        text["by_language"] = {
            code: text["by_language"].get(code) for code in settings["languages"]
        }
    # Sorted: the order in which a cache holds its languages decides no ids.
    return {**settings, "languages": sorted(settings["languages"]), "source": text}


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Returns the name of a corpus: the SHA-256 of its identity and of the cache's format."""
    text = json.dumps([FORMAT, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(made: Any, now: Any, name: str = "") -> list[str]:
    """Returns a line for every leaf that differs: 'seed = 0, now 1'."""
    if isinstance(made, dict) and isinstance(now, dict):
        return [
            line
            for key in made | now
            for line in differences(made.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    if made == now:
        return []
    if isinstance(made, list) and isinstance(now, list) and not _is_digest(made):
        items = f"{name}: {len(made)} items, now {len(now)}{_items(made, now)}"
        return [items if len(f"{made}{now}") > _LONG else f"{name} = {made}, now {now}"]
    return [f"{name} = {_short(made)}, now {_short(now)}"]


_LONG = 60


def _is_digest(value: Any) -> bool:
    """Returns True for a file's [bytes, SHA-256] (`m4.data.sources.reading.files.digest`)."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], int)
        and len(str(value[1])) == 64
    )


def _items(made: list[Any], now: list[Any]) -> str:
    """Returns '; more: en, gl; no more: pt', or their numbers if they are many."""
    said = ""
    for word, these, others in (("more", now, made), ("no more", made, now)):
        if found := [str(one) for one in these if one not in others]:
            text = ", ".join(found)
            said += f"; {word}: {text if len(text) < 2 * _LONG else len(found)}"
    return said


def _short(value: Any) -> str:
    if _is_digest(value):
        return f"{value[0]:,} bytes, SHA-256 {value[1][:12]}"
    if isinstance(value, dict) and value and all(map(_is_digest, value.values())):
        return f"{len(value)} files of {sum(one[0] for one in value.values()):,} bytes"
    text = str(value)
    return text if len(text) < _LONG else f"{text[:50]}... ({len(text):,} letters)"
