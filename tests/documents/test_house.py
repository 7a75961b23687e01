"""What CONTRIBUTING.md asks of all the code: short files and functions, the words of the field."""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

from tests.documents.blocks import LAB, PAGES, ROOT

# What readers would have to translate, each with the field's word.
WORDS = {
    r"anew|afresh": "again, rebuilt",
    r"beside": "next to, in addition",
    r"by the clock": "wall time",
    r"foreign side": "the other language",
    r"go(?:es)? on": "continues, resumes",
    r"in turn": "one after the other",
    r"near-clones?|siblings?": "closely related language",
    r"nobody|nowhere": "no ...; not",
    r"of (?:its|their) own": "separate",
    r"own (?:parts|rows)": "host batch, shards",
    r"roads?": "pipeline, dispatch",
    r"seat(?:s|ed)?": "slot, assigned",
    r"tells?|told": "reports, prints, raises",
}
# Of other things than programs: languages that cannot be told apart, a file's position.
MEANT = r"tell\s+apart|seek and tell|\.tell\(|def tell\("

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


def test_a_folder_of_m4_is_seen_at_a_glance() -> None:
    folders = [path.parent for path in (ROOT / "m4").rglob("__init__.py")]
    files = {str(folder): len([*folder.glob("[!_]*.py")]) for folder in folders}
    assert not {folder: count for folder, count in files.items() if count > 15}


def test_a_class_name_stands_for_one_thing() -> None:
    found = collections.Counter(
        node.name
        for path in (ROOT / "m4").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in found.items() if count > 1]


def test_words_are_the_fields() -> None:
    code = [path for path in sources() if ROOT / "tests" not in path.parents]
    pages = [path for path in (*PAGES, *LAB) if path.name != "CHANGELOG.md"]
    others = [path for ending in ("gin", "sh", "j2") for path in ROOT.glob(f"[!.]*/**/*.{ending}")]
    found = []
    for path in (*code, *pages, *others):
        text = re.sub(MEANT, "", path.read_text(encoding="utf-8"))
        for words, better in WORDS.items():
            for match in re.finditer(rf"\b(?:{words})\b", text, re.IGNORECASE):
                found.append(f"{path.relative_to(ROOT)}: {match[0]}: write {better}")
    assert not found
