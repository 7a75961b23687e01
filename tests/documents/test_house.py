"""What CONTRIBUTING.md asks of the code as a whole: files and functions that are short enough."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.documents.blocks import ROOT

MOST_LINES = {"file": 400, "function": 60}


def sources() -> list[Path]:
    rooms = ("m4", "tests", "scripts", "benchmarks", "examples")
    return [path for room in rooms for path in (ROOT / room).rglob("*.py")]


def test_files_and_functions_are_short() -> None:
    long = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > MOST_LINES["file"]:
            long.append(f"{path}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > MOST_LINES["function"]:
                    long.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert not long
