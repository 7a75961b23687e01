"""The identity of a corpus: everything that decides its token ids; and in what two differ."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from m4.data.sources import Source

# Raised whenever the same settings would give other files (test_format.py notices).
FORMAT = 11


def identity_of(source: Source, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings and text, as JSON."""
    text = json.loads(json.dumps(source.identity()))
    pairs = settings["language_pairs"]
    if "by_pair" in text:  # files of other languages in the folder do not matter
        text["by_pair"] = {pair: text["by_pair"].get(pair) for pair in pairs}
    # Sorted: the order in which a cache holds its pairs decides no ids.
    return {**settings, "language_pairs": sorted(pairs), "source": text}


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
    return [f"{name} = {_short(made)}, now {_short(now)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 120 else f"{text[:50]}... ({len(text):,} letters)"
