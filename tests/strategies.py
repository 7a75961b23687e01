"""The configs of gin_configs/strategies, as tests take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from m4.experiment import Experiment
from tests.command_line import experiment_of

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


def experiment_named(name: str, *bindings: str) -> Experiment:
    """The experiment of a config, with bindings on top."""
    return experiment_of(FOLDER / f"{name}.gin", *bindings)


def documented(name: str) -> dict[str, str]:
    """The config's row in the table of docs/parallelism.md."""
    text = (Path(__file__).parents[1] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    (head,) = (row for row in rows if row[:2] == ["gin file", "paper"])
    (row,) = (row for row in rows if row[:1] == [f"`{name}`"])
    return dict(zip(head, row, strict=True))
