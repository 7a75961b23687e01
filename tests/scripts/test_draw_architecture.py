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
    now = json.loads(script.read_graph().to_json())
    found = script.differences(script.committed(), now)
    assert not found, f"{found}; run: .venv/bin/python scripts/draw_architecture.py"


def test_rooms_and_arrows_are_equal_and_numbers_within_a_third(script: ModuleType) -> None:
    same = {"layers": [["a"], ["b"]], "folders": {"a": []}}
    drawn = {**same, "imports": {"a -> b": 12, "a -> c": 1}}
    # 12 - 9 = 3 is allowed for any number; a third of 16 is 5, of 19 it is 6 and 19 - 12 = 7.
    for count, is_shown in ((9, True), (8, False), (16, True), (19, False)):
        now = {**same, "imports": {"a -> b": count, "a -> c": 4}}
        found = [] if is_shown else [f"a -> b: 12 imports, now {count}"]
        assert script.differences(drawn, now) == found
    other = {**same, "folders": {"a": ["x"]}, "imports": {"a -> b": 12, "b -> c": 1}}
    assert script.differences(drawn, other) == ["folders", "gone: a -> c", "new: b -> c"]


def test_if_stale_draws_only_what_has_changed(script: ModuleType, tmp_path: Path) -> None:
    picture = tmp_path / "a.svg"
    script.draw(script.read_graph(), picture)
    command = [sys.executable, str(script.__file__), str(picture), "--if_stale"]
    before = picture.stat().st_mtime_ns
    subprocess.run(command, check=True)
    assert picture.stat().st_mtime_ns == before
    picture.write_text(picture.read_text("utf-8").replace("cli -&gt; jobs", "cli -&gt; x"), "utf-8")
    subprocess.run(command, check=True)
    assert "cli -&gt; jobs" in picture.read_text("utf-8")


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
