"""Configs of a few settings, as a run's folder sees them."""

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any


def config_of(
    settings: Mapping[str, str], text: str = "", mutable: Collection[str] = (), operative: str = ""
) -> Any:
    """Returns what `run_folder.claim` takes for a config."""
    texts = {"text": lambda: text, "operative_text": lambda: operative}
    return SimpleNamespace(settings=settings, mutable=mutable, modules={}, **texts)
