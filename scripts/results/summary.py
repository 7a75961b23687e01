"""The table of docs/results.md: a row per experiment, from its experiment.toml and means."""

from collections.abc import Sequence
from pathlib import Path

from m4.settings import InputError
from scripts.results import page
from scripts.results.found import read

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def with_table(text: str, folders: Sequence[Path]) -> str:
    """Returns the page with the current table. Raises InputError if its marks are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"docs/results.md: no {BEGIN} and {END}")
    head = ["", "claim", "here", "verdict"]
    lines = [_line(folder) for folder in folders]
    rules = "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * 4, *lines])
    return f"{before}{BEGIN}\n{rules}\n{END}{after}"


def _line(folder: Path) -> list[str]:
    found = read(folder, again=False)
    asked = found.asked
    link = f"[{asked.number}](../results/{folder.name}/README.md)"
    return [link, asked.claim, page.here(found), f"**{asked.verdict}**"]
