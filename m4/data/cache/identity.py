"""What decides a cache: its settings and its source's text; in what two caches differ."""

from __future__ import annotations

import json
from typing import Any

from m4.data.sources import Source


def identity_of(source: Source, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings and text, as JSON."""
    text = json.loads(json.dumps(source.identity()))
    if "by_language" in text:  # files of other languages in the folder do not matter
        text["by_language"] = {
            code: text["by_language"].get(code) for code in settings["languages"]
        }
    # Sorted: the order in which a cache holds its languages decides no ids.
    return {**settings, "languages": sorted(settings["languages"]), "source": text}


def differences(made: Any, now: Any, name: str = "") -> list[str]:
    """'seed = 0, now 1' for every leaf that differs."""
    if isinstance(made, dict) and isinstance(now, dict):
        return [
            line
            for key in made | now
            for line in differences(made.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if made == now else [f"{name} = {_short(made)}, now {_short(now)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:50]}..."
