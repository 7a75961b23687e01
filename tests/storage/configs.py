"""Configs of a few settings, as a run's folder sees them."""

from collections.abc import Collection, Mapping
from typing import Any


def config_of(
    settings: Mapping[str, str], text: str = "", mutable: Collection[str] = (), operative: str = ""
) -> dict[str, Any]:
    """Returns what `run_folder.claim` takes of a config."""
    texts = {"config.gin": text, "operative_config.gin": operative}
    return {"settings": settings, "mutable": mutable, "modules": {}, "texts": texts}
