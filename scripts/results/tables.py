"""Tables and numbers of the pages."""

from collections.abc import Iterable, Sequence

from m4.html import in_markdown


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns Markdown; the first column to the left, the others to the right.

    The first line and column have names.
    """
    rules = ["---", *["---:"] * (len(head) - 1)]
    named = [[in_markdown(first), *others] for first, *others in lines]
    rows = [[*map(in_markdown, head)], rules, *named]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def signed(value: float, digits: int = 1) -> str:
    """Returns the number with its sign, a minus as typeset."""
    return f"{value:+.{digits}f}".replace("-", "−")
