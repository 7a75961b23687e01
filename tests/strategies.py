"""The configs of gin_configs/strategies, as tests take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gin
import pytest

from m4 import jobs
from m4.__main__ import gin_arguments, parse_config, parser
from m4.experiment import Setup

FOLDER = Path(__file__).parents[1] / "gin_configs" / "strategies"
# The others in CI.
FIRST = ("data_parallel", "zero", "tensor_parallel", "expert_parallel")


def names(first: tuple[str, ...] | None = None) -> list[Any]:
    """The configs' names as a test's parameters; where `first` is given, others are thorough."""
    return [
        pytest.param(
            path.stem,
            marks=[] if first is None or path.stem in first else [pytest.mark.thorough],
        )
        for path in sorted(FOLDER.glob("*.gin"))
    ]


def setup_of(name: str, *bindings: str) -> Setup:
    """The config's experiment; within `own_gin`, which it leaves as the config says."""
    others, given = gin_arguments(["train", f"--gin_file={FOLDER / name}.gin", *bindings])
    parse_config(parser().parse_args(others), given)
    return gin.get_configurable(jobs.Setup)()


def documented(name: str) -> dict[str, str]:
    """The config's row in the table of docs/parallelism.md."""
    text = (Path(__file__).parents[1] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    (head,) = (row for row in rows if row[:2] == ["gin file", "paper"])
    (row,) = (row for row in rows if row[:1] == [f"`{name}`"])
    return dict(zip(head, row, strict=True))
