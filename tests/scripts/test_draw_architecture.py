"""The picture in ARCHITECTURE.md."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "draw_architecture.py"
    spec = importlib.util.spec_from_file_location("draw_architecture", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_picture_names_every_room(script: ModuleType) -> None:
    drawn = re.findall(r"<text[^>]*>([^<]+)</text>", script.PICTURE.read_text("utf-8"))
    rooms = {room for layer in script.read_graph().layers for room in layer}
    assert rooms <= {*drawn}, "run: .venv/bin/python scripts/draw_architecture.py"
