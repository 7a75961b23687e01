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


def test_imports_are_counted_once_a_file_and_module(script: ModuleType, tmp_path: Path) -> None:
    files = {
        "pyproject.toml": '[[tool.importlinter.contracts]]\ntype = "layers"\n'
        'layers = ["top", "left | right", "gone", "base"]\n',
        "m4/top.py": '"""The `top`.\n\nMore."""\n'
        "import m4.base\nfrom m4.left import part, part as p\n",
        "m4/left/__init__.py": "",
        "m4/left/part.py": "def f():\n    from m4.base import name, other\n",
        "m4/left/inner/__init__.py": "import os\n",
        "m4/right.py": "",
        "m4/base.py": "name = other = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = script.read_graph(tmp_path)
    assert graph.layers == [["top"], ["left", "right"], ["base"]]
    assert graph.folders["left"] == ["inner"]
    assert graph.texts["top"] == "The top."
    assert graph.imports == {("top", "base"): 1, ("top", "left"): 1, ("left", "base"): 1}
