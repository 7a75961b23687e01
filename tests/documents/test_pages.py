"""What the pages promise as a whole: links lead somewhere, the README is short, one version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.documents.blocks import PAGES, ROOT, blocks_of

README = ROOT / "README.md"
DOCUMENTS = [*PAGES, *sorted((ROOT / "docs" / "lab").glob("*.md"))]
FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_readme_is_for_a_first_visit() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 1200
    (python,) = [block for block in blocks_of(README) if block.language == "python"]
    assert len([line for line in python.text.splitlines() if line.strip()]) <= 12


def test_the_readme_leads_to_every_document() -> None:
    linked = set(re.findall(r"\]\((docs/[\w/]+\.md)", README.read_text(encoding="utf-8")))
    assert linked >= {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    lab = ROOT / "docs" / "lab"
    notes = set(re.findall(r"\]\(([\w.-]+\.md)\)", (lab / "README.md").read_text("utf-8")))
    assert "docs/lab/README.md" in linked
    assert notes >= {path.name for path in lab.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = FENCES.sub("", document.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


def anchors(document: Path) -> set[str]:
    """What GitHub makes of the headings."""
    text = FENCES.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_the_citation_has_the_packages_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
