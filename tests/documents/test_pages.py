"""Promises of all pages: links, names of files, commands and settings are right."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from m4.cli.main import parse
from tests.documents.blocks import LAB, PAGES, ROOT

DOCUMENTS = [*PAGES, *LAB]
REFERENCE = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which names what was
FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(document))):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


def anchors(document: Path) -> set[str]:
    """Returns the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCES.sub("", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", REFERENCE, ids=lambda path: path.name)
def test_named_files_exist(page: Path) -> None:
    rooms = "m4|tests|docs|scripts|gin_configs|benchmarks|examples"
    for name in re.findall(rf"`((?:{rooms})/[\w./-]+)`", prose(page)):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", REFERENCE, ids=lambda path: path.name)
def test_named_commands_have_these_arguments(page: Path) -> None:
    for text in re.findall(r"`m4 ([^`]+)`", prose(page)):
        if text in ("translate", "data remove"):  # which need arguments
            continue
        status: int | str | None = 0
        try:
            parse(shlex.split(text))
        except SystemExit as error:
            status = error.code
        assert status == 0, f"{page.name}: m4 {text}"


def test_named_settings_exist() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "m4").rglob("*.py")]
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    members = {node.name: {*names_in(node)} for node in classes}
    for page in [page for page in REFERENCE if page.name != "t5x.md"]:  # has T5X's names too
        for name, member in re.findall(r"`(?:\w+[./])*([A-Z]\w+)\.([a-z]\w+)", prose(page)):
            known = name not in members or member in members[name]
            assert known, f"{page.name}: {name}.{member}"


def names_in(node: ast.ClassDef) -> Iterator[str]:
    """A class's fields, methods, their arguments, and attributes."""
    for inner in ast.walk(node):
        match inner:
            case (
                ast.AnnAssign(target=ast.Name(id=name))
                | ast.FunctionDef(name=name)
                | ast.Attribute(attr=name)
                | ast.arg(arg=name)
            ):
                yield name


def test_the_citation_has_the_packages_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
