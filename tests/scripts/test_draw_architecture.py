"""The picture in ARCHITECTURE.md shows the code as it is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
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


def test_the_committed_picture_is_of_this_code(script: ModuleType) -> None:
    """Rooms, layers, folders and arrows are equal; a number may be a third off."""
    drawn = script.committed()
    now = json.loads(script.read_graph().to_json())
    redraw = "run: .venv/bin/python scripts/draw_architecture.py"
    assert drawn["layers"] == now["layers"], redraw
    assert drawn["folders"] == now["folders"], redraw
    assert set(drawn["imports"]) == set(now["imports"]), redraw
    for arrow, count in now["imports"].items():
        assert abs(drawn["imports"][arrow] - count) <= max(3, count / 3), f"{arrow}: {redraw}"


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


def test_the_same_graph_gives_the_same_bytes(script: ModuleType, tmp_path: Path) -> None:
    graph = script.read_graph()
    for name in ("a.svg", "b.svg"):
        script.draw(graph, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert script.committed(tmp_path / "a.svg") == json.loads(graph.to_json())


def test_help_draws_nothing(script: ModuleType, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    said = subprocess.run(
        [sys.executable, str(script.__file__), "--help"],
        cwd=empty, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "architecture.svg" in said.stdout
    assert not list(empty.iterdir())
