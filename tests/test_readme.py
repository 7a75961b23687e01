"""What the documents promise: the README's Python runs, links lead somewhere, one version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import m4 as command

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def twelve_lines() -> str:
    (code,) = (text for kind, text in FENCES.findall(README.read_text("utf-8")) if kind == "python")
    return code


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same lines on a config of a few seconds, after what they say went before.
    tiny = (ROOT / "tests" / "testdata" / "tiny.gin").read_text(encoding="utf-8")
    (tmp_path / "gin_configs").mkdir()
    (tmp_path / "gin_configs" / "demo.gin").write_text(tiny, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")  # of the baselines' processes
    said = command("demo", "--gin_file=gin_configs/demo.gin", "--model_dir=runs/demo")
    assert said.status == 0, said.err
    names: dict[str, Any] = {}
    exec(compile(twelve_lines(), str(README), "exec"), names)
    assert names["batch"]["encoder_input_tokens"].shape[0] == 32
    assert len(names["run"].translate(["3 weeks ago", "4 weeks ago"], to="gl")) == 2
    assert {row["system"] for row in names["scores"]} >= {"moe", "copy"}
    assert (tmp_path / "delta_bleu.png").stat().st_size > 1000


def test_the_readme_is_for_a_first_visit() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 1200
    assert len([line for line in twelve_lines().splitlines() if line.strip()]) <= 12


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
