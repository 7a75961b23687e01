"""Tables and numbers of the pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns Markdown; the first column to the left, the others to the right."""
    rules = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rules, *lines])


def signed(value: float, digits: int = 1) -> str:
    """Returns the number with its sign, a minus as typeset."""
    return f"{value:+.{digits}f}".replace("-", "−")
