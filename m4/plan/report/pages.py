"""Titled tables with notes, from one description: on the terminal, in Markdown and in HTML."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from m4 import html
from m4.storage.files import write_text

TEMPLATE = Path(__file__).with_name("plan.html.j2")


class Section(NamedTuple):
    """A table with a title and notes; its first row is the header. picture: a PNG in base64."""

    title: str
    notes: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    picture: str = ""


def show(sections: Sequence[Section], console: Console) -> None:
    """Prints tables and notes."""
    for section in sections:
        if section.rows:
            table = Table(title=section.title, title_justify="left", box=box.SIMPLE_HEAD)
            for index, name in enumerate(section.rows[0]):
                table.add_column(name, justify="right" if index else "left")
            for row in section.rows[1:]:
                table.add_row(*row)
            console.print(table)
        for note in section.notes:
            console.print(note, style="dim", highlight=False)


def write(
    stem: Path, title: str, verdict: str, sections: Sequence[Section], json_text: str
) -> list[Path]:
    """Writes stem.json, .md and .html; returns them."""
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".json", ".md", ".html")]
    page = html.render(TEMPLATE, title=title, verdict=verdict, sections=sections)
    texts = (json_text, markdown(title, verdict, sections), page)
    for path, text in zip(paths, texts, strict=True):
        write_text(path, text)
    return paths


def markdown(title: str, verdict: str, sections: Sequence[Section]) -> str:
    """The sections as Markdown tables."""
    lines = [f"# {_cell(title)}", "", _cell(verdict), ""]
    for section in sections:
        lines += [f"## {_cell(section.title)}", ""]
        for note in section.notes:
            lines += [_cell(note), ""]
        if section.rows:
            head, *rest = section.rows
            lines.append("| " + " | ".join(map(_cell, head)) + " |")
            lines.append("| --- |" + " ---: |" * (len(head) - 1))
            lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rest]
            lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that ends neither a cell nor a line, and is no HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
