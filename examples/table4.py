"""Table 4 of GShard (arXiv 2006.16668), compiled: `python examples/table4.py`.

Every operator of the table, annotated as there and weakly scaled: the split dimensions grow with
the number of devices D, all others are constant. XLA's partitioner compiles it for D fake CPU
devices; it never runs. Collectives are read from the program (`m4.plan.hlo`), FLOPs a device from
XLA's cost analysis (no operator has a loop, which that would count once).
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from m4.parallel.platform.jax_setup import use_fake_devices
from m4.parallel.sharding import replicate, split
from m4.plan.hlo import collectives, summary
from m4.storage.files import write_text

ABBREVIATIONS = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "all-to-all": "AA",
    "collective-permute": "CP",
}
# Sizes of dimensions that do not grow, and of one device's shard of those that do. At most 64
# devices: the dispatch has C = 64 / D slots.
_PART = 64
MOST_DEVICES = 64

# Devices -> a function and its annotated arguments.
Program = Callable[[Sequence[Any]], tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]]


class Operator(NamedTuple):
    """A row of the paper's table.

    Attributes:
        name, split: As in the paper; the dimensions that are split and grow with D.
        compute: The paper's growth of the FLOPs a device.
        listed: False for an operator of the paper's text that is not in its table.
    """

    name: str
    split: str
    communication: str
    kinds: frozenset[str]
    program: Program
    compute: str = "O(1)"
    listed: bool = True


class Cost(NamedTuple):
    """Cost of an operator for one of D devices; `collectives` counts them by kind."""

    collectives: dict[str, int]
    payload_bytes: int
    flops: float


class Row(NamedTuple):
    """An operator and the costs that were found.

    Attributes:
        costs: Number of devices D -> cost.
        bytes_growth, compute_growth: Growth of the payload and of the FLOPs a device, in D.
        time_growth: Growth of the communication's time on a 2-D torus of D devices. Sending to
            neighbours or around a ring takes time in proportion to the bytes. An all-to-all's bytes
            take sqrt(D) / 2 hops on average, and links a device are constant: its time grows by
            sqrt(D) more than its bytes (section 5.3 of the paper).
    """

    operator: Operator
    costs: dict[int, Cost]
    bytes_growth: str
    time_growth: str
    compute_growth: str
    agrees: bool


def table(counts: Sequence[int]) -> list[Row]:
    """Compiles every operator for each number of devices."""
    allowed = [2**n for n in range(1, MOST_DEVICES.bit_length())]
    if len(counts) < 2 or sorted({*counts}) != list(counts) or not {*counts} <= {*allowed}:
        raise ValueError(f"{counts}: must be two or more increasing numbers of {allowed}")
    use_fake_devices(max(counts))
    return [row(operator, counts) for operator in OPERATORS]


def row(operator: Operator, counts: Sequence[int]) -> Row:
    """Compiles one operator for each number of devices."""
    costs = {count: cost(operator, count) for count in counts}
    kinds = {kind for cost in costs.values() for kind in cost.collectives}
    sent = growth({count: cost.payload_bytes for count, cost in costs.items()})
    time = written(None if sent is None else sent + (0.5 if "all-to-all" in kinds else 0.0))
    compute = written(growth({count: cost.flops for count, cost in costs.items()}))
    agrees = kinds <= operator.kinds and bool(kinds) == bool(operator.kinds)
    agrees &= (time, compute) == (operator.communication, operator.compute)
    return Row(operator, costs, written(sent), time, compute, agrees)


def cost(operator: Operator, count: int) -> Cost:
    """Compiles an operator for `count` devices."""
    function, arguments = operator.program(jax.devices("cpu")[:count])
    compiled = jax.jit(function).lower(*arguments).compile()
    totals = summary(collectives(compiled.as_text() or ""))
    return Cost(
        {kind: total.count for kind, total in totals.items()},
        sum(total.payload_bytes for total in totals.values()),
        (compiled.cost_analysis() or {})["flops"],
    )


def growth(values: dict[int, float]) -> float | None:
    """Fits the exponent p of values ~ D^p, by least squares in logarithms; None where all are 0.

    >>> growth({2: 6.0, 8: 24.0})
    1.0
    """
    if not any(values.values()):
        return None
    assert all(values.values()), values
    slope = np.polyfit(np.log([*values]), np.log([*values.values()]), 1)[0]
    return round(float(slope), 2) + 0.0  # no -0.0


def written(exponent: float | None) -> str:
    """Writes 0.5 as "O(√D)"; exponents within 0.05 of 0, 1/2, 1 are rounded to it."""
    if exponent is None:
        return "0"
    for known, name in ((0.0, "O(1)"), (0.5, "O(√D)"), (1.0, "O(D)")):
        if math.isclose(exponent, known, abs_tol=0.05):
            return name
    return f"O(D^{exponent:.2f})"


def show(rows: Sequence[Row], console: Console) -> None:
    """Prints the table."""
    counts = [*rows[0].costs]
    counts = [counts[0], counts[-1]]
    made = Table(box=SIMPLE_HEAD, title="What partitioned operators send")
    for name in ("operator", "split", "sends", *(f"bytes D={count}" for count in counts), "bytes",
                 "time", "paper: time", "FLOPs", "paper: FLOPs", ""):  # fmt: skip
        made.add_column(name, no_wrap=True)
    for row in rows:
        operator = row.operator
        last = row.costs[counts[-1]].collectives
        sends = ", ".join(f"{n} {ABBREVIATIONS.get(kind, kind)}" for kind, n in last.items())
        kinds = " or ".join(sorted(ABBREVIATIONS.get(kind, kind) for kind in operator.kinds))
        paper = f"{operator.communication} {kinds}".strip()
        made.add_row(
            operator.name,
            operator.split,
            sends or "nothing",
            *(f"{row.costs[count].payload_bytes:,}" for count in counts),
            row.bytes_growth,
            row.time_growth,
            paper if operator.listed else f"({paper})",
            row.compute_growth,
            operator.compute,
            "=" if row.agrees else "differs",
        )
    console.print(made)
    console.print(
        "Bytes are those of one device, the larger of input and output. Time is that on a 2-D "
        "torus, by formula (an all-to-all's bytes take √D / 2 hops). AR all-reduce, AG all-gather, "
        "AA all-to-all, CP collective-permute. (In brackets: not in the paper's table.)"
    )


def save(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows as JSON, with the version of JAX that compiled them."""
    made = [
        {
            **row._asdict(),
            "operator": row.operator.name,
            "split": row.operator.split,
            "costs": {count: cost._asdict() for count, cost in row.costs.items()},
        }
        for row in rows
    ]
    text = json.dumps({"jax": jax.__version__, "rows": made}, ensure_ascii=False, indent=1)
    write_text(path, text + "\n")


# ------------------------------------------------------------------------------- operators


def _array(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _elementwise(function: Callable[..., Any], dimensions: int, arguments: int) -> Program:
    """An operator on arrays whose first dimension is split, the others of 64."""

    def program(devices: Sequence[Any]) -> Any:
        count = len(devices)
        # Of batched matrices each device has one.
        rows = count if dimensions == 3 else _PART * count
        sizes = (rows, *[_PART] * (dimensions - 1))
        return function, (split(_array(*sizes), 0, count, devices=devices),) * arguments

    return program


def _matmul(a: int | None, b: int | None, out: int | None = None) -> Program:
    """AB,BC->AC with one dimension of each operand split (None: replicated), and of the result.

    Dimensions that are split in an operand grow.
    """

    def program(devices: Sequence[Any]) -> Any:
        count = len(devices)

        def grown(*dimensions: bool) -> int:
            return _PART * count if any(dimensions) else _PART

        A, B, C = grown(a == 0), grown(a == 1, b == 0), grown(b == 1)
        left, right = (
            replicate(x, devices=devices) if d is None else split(x, d, count, devices=devices)
            for x, d in ((_array(A, B), a), (_array(B, C), b))
        )

        def function(left: jax.Array, right: jax.Array) -> jax.Array:
            result = left @ right
            if out is None:
                return replicate(result, devices=devices)
            return split(result, out, count, devices=devices)

        return function, (left, right)

    return program


def _dispatch(devices: Sequence[Any]) -> Any:
    count = len(devices)
    G, E, C, S, M = count, count, MOST_DEVICES // count, _PART, _PART
    dispatch_GSEC, x_GSM = (
        split(x, 0, count, devices=devices) for x in (_array(G, S, E, C), _array(G, S, M))
    )

    def function(dispatch_GSEC: jax.Array, x_GSM: jax.Array) -> jax.Array:
        sent_EGCM = jnp.einsum("GSEC,GSM->EGCM", dispatch_GSEC, x_GSM)
        # Split by groups, then by experts: otherwise the partitioner may exchange the mask instead
        # of the tokens.
        return split(split(sent_EGCM, 1, count, devices=devices), 0, count, devices=devices)

    return function, (dispatch_GSEC, x_GSM)


def _convolution(devices: Sequence[Any]) -> Any:
    count = len(devices)
    x = split(_array(2, 4, 8 * count, 8), 2, count, devices=devices)
    kernel = replicate(_array(3, 3, 4, 4), devices=devices)

    def function(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW")
        )

    return function, (x, kernel)


_NONE: frozenset[str] = frozenset()
_AR, _AA = frozenset({"all-reduce"}), frozenset({"all-to-all"})
_CP = frozenset({"collective-permute"})
_AG_OR_CP = frozenset({"all-gather"}) | _CP
_MATMUL = "Matmul(AB,BC->AC)"

OPERATORS = (
    Operator("Add(A,A->A)", "A", "0", _NONE, _elementwise(jnp.add, 1, 2)),
    Operator(_MATMUL, "B", "O(1)", _AR, _matmul(1, 0)),
    Operator(_MATMUL, "A", "0", _NONE, _matmul(0, None, 0)),
    Operator(_MATMUL, "A,B", "O(D)", _AG_OR_CP, _matmul(0, 0, 0), "O(D)"),
    Operator(_MATMUL, "A,C", "O(D)", _AG_OR_CP, _matmul(0, 1, 0), "O(D)"),
    Operator("Matmul(BIJ,BJK->BIK)", "B", "0", _NONE, _elementwise(jnp.matmul, 3, 2), listed=False),
    Operator("Reduce(AB->A)", "A", "0", _NONE, _elementwise(lambda x: x.sum(1), 2, 1)),
    Operator("Reduce(AB->B)", "A", "O(1)", _AR, _elementwise(lambda x: x.sum(0), 2, 1)),
    Operator("Einsum(GSEC,GSM->EGCM)", "G,E", "O(√D)", _AA, _dispatch),
    Operator("Convolution(BIXY,xyIO->BOXY)", "X", "O(1)", _CP, _convolution),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--output", type=Path, help="a JSON file to write as well")
    options = parser.parse_args()
    rows = table(options.devices)
    show(rows, Console(width=None if sys.stdout.isatty() else 200))
    if options.output:
        save(rows, options.output)


if __name__ == "__main__":
    main()
