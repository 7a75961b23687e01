"""What decides a cache: its settings, checked, and its source's text; in what two caches differ."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from m4.data.sources import Source
from m4.data.vocabulary.vocabulary import check_size


def check(settings: dict[str, Any], workers: int | None) -> None:
    """ValueError for mistakes that would show only after all text is read."""
    for name in ("vocabulary_size", "vocabulary_sentences", "segmentations"):
        _check_whole(name, settings[name])
    for name, number in (
        ("target_vocabulary_size", settings["target_vocabulary_size"]),
        ("workers", workers),
    ):
        if number is not None:
            _check_whole(name, number)
    check_size(settings["vocabulary_size"], 1 + len(settings["languages"]))
    if settings["target_vocabulary_size"] is not None:
        name = "cache.prepare.target_vocabulary_size"
        check_size(settings["target_vocabulary_size"], 0, name)
    if not settings["vocabulary_temperature"] >= 1.0:
        raise ValueError(
            f"vocabulary_temperature is {settings['vocabulary_temperature']}: must be at least 1 "
            "(cache.prepare.vocabulary_temperature)"
        )
    for name, number in (
        ("vocabulary_sentences", settings["vocabulary_sentences"]),
        ("segmentations", settings["segmentations"]),
        ("workers", workers),
    ):
        if number is not None and number < 1:
            raise ValueError(f"cache.prepare.{name} is {number}: must be at least 1")
    if settings["segmentations"] > 1 and not 0.0 < settings["sampling_alpha"] < 1.0:
        raise ValueError(
            f"cache.prepare.sampling_alpha is {settings['sampling_alpha']}: must be between 0 and 1"
        )


def _check_whole(name: str, number: object) -> None:
    if type(number) is not int:
        raise ValueError(f"cache.prepare.{name} is {number!r}: must be a whole number")


def checked_languages(languages: Sequence[str]) -> list[str]:
    """The codes, each once, none English, all fit for a direction's name."""
    if isinstance(languages, str):
        raise ValueError(f"cache.prepare.languages is {languages!r}: must be a list of codes")
    codes = list(languages)
    for code in codes:
        if not isinstance(code, str) or code == "en" or not re.fullmatch(r"[A-Za-z0-9_]+", code):
            raise ValueError(
                f"language {code!r}: codes are letters, digits and '_', and English is on the "
                "other side already (cache.prepare.languages)"
            )
    if len(set(codes)) < len(codes) or not codes:
        raise ValueError(
            f"languages {codes}: need at least one, each once (cache.prepare.languages)"
        )
    return codes


def identity_of(source: Source, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings and text, as JSON."""
    text = json.loads(json.dumps(source.identity()))
    if "by_language" in text:  # files of other languages in the folder do not matter
        text["by_language"] = {
            code: text["by_language"].get(code) for code in settings["languages"]
        }
    # Sorted: gin writes the keys of a dictionary in another order than it was given, and the order
    # in which a cache holds its languages is its own affair.
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
