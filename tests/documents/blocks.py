"""The blocks of the documents, each with the mark that says how it is tested.

A mark is a comment that no reader sees, on the line above the block: `<!-- test: WAY -->` or
`<!-- test: WAY: MORE -->`.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# Dated notes: their words are of their day, their commands still work.
LAB = sorted((ROOT / "docs" / "lab").glob("*.md"))

# What a test does with a block, the best way first.
WAYS = {
    "run": "runs the commands, or the Python, after `make demo`, with the sizes of "
    "tests/testdata/tiny.gin; `run: WORDS` gives every m4 command these words as well "
    "(--gin.TRAIN_STEPS=2), and Python's arguments these values (n_best=2). With prompts (`$ `) "
    "the lines between are compared with the output, but for numbers and `...`",
    "run thorough": "the same in processes, with the shell's environment, by `make test-thorough`: "
    "for what takes more than a few seconds",
    "dry_run": "only reads arguments and configs, and what scripts/*.sh and make would do; other "
    "programs are in `UNRUN` of tests/documents/commands.py",
    "gin": "reads the bindings at the end of gin_configs/demo.gin, or `gin: FILE`",
    "formula": "nothing to run",
    "not run": "`not run: WHY`",
}


@dataclass(frozen=True)
class Block:
    """A fenced block, with the line of its fence from 1, and `more`, the rest of its mark."""

    page: str
    line: int
    language: str
    text: str
    way: str | None
    more: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> str:
        """Returns only the commands: in a block with prompts, the lines behind "$ "."""
        lines = self.text.replace("\\\n", "\\\0").splitlines()
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return "\n".join(typed or lines).replace("\0", "\n")

    @property
    def output(self) -> list[str]:
        """Returns the lines that a block with prompts shows as printed; "..." stands for more."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if not any(line.startswith("$ ") for line in lines):
            return []
        return [line for line in lines if not line.startswith("$ ") and line.strip() != "..."]


def blocks() -> list[Block]:
    """Returns every block of every page."""
    return [block for page in [*PAGES, *LAB] for block in blocks_of(page)]


def blocks_of(page: Path) -> list[Block]:
    """Returns every block of a page, in order."""
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    return read(page.read_text(encoding="utf-8"), name)


def read(text: str, page: str) -> list[Block]:
    """Returns the blocks of a page's text, without the indentation of blocks in lists."""
    lines = text.splitlines()
    found, opened = [], None
    for number, line in enumerate(lines):
        fence = re.fullmatch(r"(\s*)```(\w*)", line)
        if fence is None:
            continue
        if opened is None:
            opened = number
            continue
        inside = textwrap.dedent("\n".join(lines[opened + 1 : number]))
        language = lines[opened].strip().removeprefix("```")
        way, more = mark(lines[opened - 1] if opened else "")
        found.append(Block(page, opened + 1, language, inside + "\n", way, more))
        opened = None
    assert opened is None, f"{page}:{opened}: a block without an end"
    return found


def mark(line: str) -> tuple[str | None, str]:
    """Returns (way, the rest) of the line above a block; the way is None if it is no mark."""
    said = re.fullmatch(r"\s*<!-- test: ([^:]+?)(?:: (.+?))? -->", line)
    return (said[1], said[2] or "") if said else (None, "")
