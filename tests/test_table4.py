"""Table 4 of GShard: the collective that each partitioned operator needs, and its growth."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console

from tests.test_examples import FOLDER, example

table4 = example("table4")

# (operator, what is split) -> collectives of the compiled program, at any number of devices, and
# their bytes on one of D devices. float32; what does not grow is 64 long, of what grows each device
# has 64.
KINDS = {
    ("Add(A,A->A)", "A"): ({}, lambda D: 0),
    # Partial sums of AC = 64 x 64 are added up.
    ("Matmul(AB,BC->AC)", "B"): ({"all-reduce": 1}, lambda D: 64 * 64 * 4),
    ("Matmul(AB,BC->AC)", "A"): ({}, lambda D: 0),
    # Everyone needs the whole of the right side, whose B or C is 64 D.
    ("Matmul(AB,BC->AC)", "A,B"): ({"all-gather": 1}, lambda D: 64 * D * 64 * 4),
    ("Matmul(AB,BC->AC)", "A,C"): ({"all-gather": 1}, lambda D: 64 * D * 64 * 4),
    ("Matmul(BIJ,BJK->BIK)", "B"): ({}, lambda D: 0),
    ("Reduce(AB->A)", "A"): ({}, lambda D: 0),
    ("Reduce(AB->B)", "A"): ({"all-reduce": 1}, lambda D: 64 * 4),
    # One group's tokens: E C = D x 64 / D slots of M = 64.
    ("Einsum(GSEC,GSM->EGCM)", "G,E"): ({"all-to-all": 1}, lambda D: 64 * 64 * 4),
    # A row to either neighbour: of batch 2, 4 channels, 8 columns.
    ("Convolution(BIXY,xyIO->BOXY)", "X"): (
        {"collective-permute": 2},
        lambda D: 2 * (2 * 4 * 1 * 8 * 4),
    ),
}


@functools.cache
def rows() -> tuple[Any, ...]:
    return tuple(table4.table([2, 8]))


def test_kinds_and_bytes() -> None:
    assert {(row.operator.name, row.operator.split) for row in rows()} == set(KINDS)
    for row in rows():
        kinds, payload = KINDS[row.operator.name, row.operator.split]
        for count, cost in row.costs.items():
            assert cost.collectives == kinds, row
            assert cost.payload_bytes == payload(count), row


@pytest.mark.slow
@pytest.mark.thorough
def test_kinds_and_bytes_up_to_64_devices(tmp_path: Path) -> None:
    # A subprocess: JAX has eight devices here, for good.
    path = tmp_path / "table4.json"
    command = [sys.executable, str(FOLDER / "table4.py"), f"--output={path}"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {(row["operator"], row["split"]) for row in found} == set(KINDS)
    for row in found:
        kinds, payload = KINDS[row["operator"], row["split"]]
        assert [*row["costs"]] == ["2", "4", "8", "16", "32", "64"]
        for count, cost in row["costs"].items():
            assert cost["collectives"] == kinds, (row, count)
            assert cost["payload_bytes"] == payload(int(count)), (row, count)
        assert row["agrees"], row


def test_flops_of_one_device() -> None:
    flops = {(row.operator.name, row.operator.split): row.costs[8].flops for row in rows()}
    # A multiplication and an addition for each of A B C, all 64 but for what grows to 8 x 64.
    assert flops["Matmul(AB,BC->AC)", "A"] == 2 * 64**3
    assert flops["Matmul(AB,BC->AC)", "A,B"] == flops["Matmul(AB,BC->AC)", "A,C"] == 8 * 2 * 64**3
    assert flops["Add(A,A->A)", "A"] == 64


def test_growth_is_the_papers() -> None:
    # As printed there: Table 4, "Communication"; the all-to-all's from section 5.3.
    assert [(row.time_growth, row.compute_growth) for row in rows() if row.operator.listed] == [
        ("0", "O(1)"),
        ("O(1)", "O(1)"),
        ("0", "O(1)"),
        ("O(D)", "O(D)"),
        ("O(D)", "O(D)"),
        ("0", "O(1)"),
        ("O(1)", "O(1)"),
        ("O(√D)", "O(1)"),
        ("O(1)", "O(1)"),
    ]
    assert all(row.agrees for row in rows())


def test_differences_from_the_paper_are_reported() -> None:
    reduce = next(o for o in table4.OPERATORS if o.name == "Reduce(AB->B)")
    assert not table4.row(reduce._replace(kinds=frozenset()), [2, 8]).agrees
    assert not table4.row(reduce._replace(communication="O(D)"), [2, 8]).agrees
    assert not table4.row(reduce._replace(compute="O(D)"), [2, 8]).agrees


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({2: 0, 8: 0}, "0"),
        ({2: 7, 4: 7, 8: 7}, "O(1)"),
        ({2: 6, 4: 12, 64: 192}, "O(D)"),
        ({4: 2, 16: 4, 64: 8}, "O(√D)"),
        ({2: 4, 4: 16}, "O(D^2.00)"),
    ],
)
def test_growth(values: dict[int, float], name: str) -> None:
    assert table4.written(table4.growth(values)) == name


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table4.show(rows(), Console(width=200))
    line = next(line for line in capsys.readouterr().out.splitlines() if "Einsum" in line)
    name, what, number, kind, least, most, *_, verdict = line.split()
    assert (name, what, number, kind) == ("Einsum(GSEC,GSM->EGCM)", "G,E", "1", "AA")
    assert (least, most, verdict) == ("16,384", "16,384", "=")
    table4.save(rows(), output := tmp_path / "table4.json")
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written["jax"] == jax.__version__
    assert [row["operator"] for row in written["rows"]] == [o.name for o in table4.OPERATORS]
    assert written["rows"][1]["costs"]["8"]["collectives"] == {"all-reduce": 1}


@pytest.mark.parametrize("devices", [[2, 3], [8], [8, 2]])
def test_mistakes(devices: list[int]) -> None:
    with pytest.raises(ValueError, match="must be two or more increasing numbers"):
        table4.table(devices)
