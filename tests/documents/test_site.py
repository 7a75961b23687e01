"""The site of mkdocs.yml builds without a warning, and every notebook runs to its end."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.blocks import LAB, PAGES, ROOT

PACKAGES = Path(sys.prefix) / "share" / "m4" / "docs"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
has_packages = pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs `make docs-setup`")


def run(*arguments: str, **environment: str) -> str:
    """Runs Python with the site's packages and returns what it printed."""
    said = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=3600,
        env={**os.environ, "PYTHONPATH": f"{PACKAGES}:{ROOT}", "NO_MKDOCS_2_WARNING": "1",
             "JAX_NUM_CPU_DEVICES": "1", **environment},
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


def test_every_page_has_one_place_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    places = re.findall(r"([\w/-]+\.md)$", config.split("\nnav:\n")[1], re.MULTILINE)
    assert len(places) == len({*places})
    pages = [f"docs/{place}" for place in places if (ROOT / "docs" / place).is_file()]
    notebooks = {f"notebooks/{path.stem}.md" for path in NOTEBOOKS}
    documents = {str(path.relative_to(ROOT)) for path in [*PAGES, *LAB]}
    assert {*pages} == {name for name in documents if name.startswith("docs/")}
    assert notebooks == {place for place in places if place.startswith("notebooks/")}
    assert {*places} >= documents - {*pages} - {"README.md"}  # which is index.md


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_m4_is_there(path: Path) -> None:
    """Also where the site's packages, with which it runs, are not installed."""
    for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(one, ast.ImportFrom) and (one.module or "").split(".")[0] == "m4":
            names = [alias.name for alias in one.names]
            module = __import__(one.module or "", fromlist=names)  # submodules, too
            assert [name for name in names if not hasattr(module, name)] == [], one.module


@has_packages
@pytest.mark.thorough
@pytest.mark.every_part
def test_the_site_builds(tmp_path: Path) -> None:
    run("-m", "mkdocs", "build", "--quiet", f"--site-dir={tmp_path}", NOTEBOOKS="0")
    pages = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*.html")}
    for name, path in pages.items():
        text = path.read_text(encoding="utf-8")
        # A reader's browser asks no other host for anything.
        assert not re.search(r"<(?:script|img|link)[^>]+(?:src|href)=\"?https?:", text), name
    assert "Number of packed rows per step" in plain(pages["settings.html"])
    # Files outside docs/ that pages link to, commands, and docstrings.
    assert "class MoeLayer" in plain(pages["m4/model/moe.py.html"])
    assert "usage: m4 translate" in plain(pages["commands.html"])
    assert "Routes each token to its best expert" in plain(pages["api/model.html"])


def plain(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))


@has_packages
@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path) -> None:
    run("-c", "import jupytext, sys; from scripts.docs_site import execute; "
        "execute(jupytext.read(sys.argv[1]))", str(path))  # fmt: skip
