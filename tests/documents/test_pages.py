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
    """Returns a page without its blocks."""
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


# Names of other packages, and of files.
OTHERS = ("CITATION", "Europarl", "TIME", "OUTPUT", "T5ForConditionalGeneration", "train", "atlas")
OTHERS_IN_T5X = ("Trainer", "MoeTrainer", "CheckpointConfig")  # which also has T5X's


def test_named_settings_exist() -> None:
    members: dict[str, set[str]] = {}
    modules = "|".join(path.stem for path in (ROOT / "m4").rglob("*.py"))
    for path in (ROOT / "m4").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(names_in(node))
            elif isinstance(node, ast.FunctionDef):
                members.setdefault(f"{path.stem}.{node.name}", set()).update(names_in(node))
    named = 0
    for page in REFERENCE:
        others = OTHERS + (OTHERS_IN_T5X if page.name == "t5x.md" else ())
        of_classes = re.findall(r"`(?:\w+[./])*([A-Z]\w+)\.([a-z]\w+)", prose(page))
        function = rf"`(?:\w+/)*@?((?:{modules})\.[a-z]\w+)\.([a-z]\w+)"
        for name, member in of_classes + re.findall(function, prose(page)):
            if name.partition(".")[0] not in others:
                assert member in members.get(name, ()), f"{page.name}: {name}.{member}"
                named += 1
    assert named > 40


def names_in(node: ast.AST) -> Iterator[str]:
    """Returns a class's fields, methods, arguments and attributes, or a function's arguments."""
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
