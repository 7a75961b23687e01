"""Table 4 of GShard (arXiv 2006.16668), compiled: what each partitioned operator sends.

Every operator of the table, annotated as there and weakly scaled: the split dimensions grow with
the number of devices D, all others are constant. XLA's partitioner compiles it for D fake CPU
devices; it never runs. Collectives are read from the program (`m4.plan.hlo.collectives`), FLOPs a
device from XLA's cost analysis (no operator has a loop, which that would count once).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from m4.plan.hlo.collectives import collectives, summary
from m4.settings import InputError
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

_WIDE = 180  # columns of a terminal that show the bytes for all six numbers of devices

PartitionedFunction = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


class Operator(NamedTuple):
    """A row of the table.

    Attributes:
        name, split: as in the paper; the dimensions that are split and grow with D.
        compute: the paper's FLOPs a device.
        communication, kinds: the paper's growth of its time, and the collectives that it allows;
            listed False: by its text, as the table does not have the operator.
        program: D devices -> a function and its annotated arguments.
    """

    name: str
    split: str
    compute: str
    communication: str
    kinds: frozenset[str]
    program: Callable[[Sequence[Any]], PartitionedFunction]
    listed: bool = True


class Cost(NamedTuple):
    """What an operator costs one of D devices."""

    collectives: dict[str, int]  # kind -> how many
    payload_bytes: int
    flops: float


@dataclass(frozen=True)
class OperatorGrowth:
    """An operator and what was found.

    Attributes:
        bytes_growth, compute_growth: of the payload and the FLOPs a device, in D.
        time_growth: of the communication's time on a 2-D torus of D devices. Sending to neighbours
            or around a ring takes time in proportion to the bytes. An all-to-all's bytes take
            sqrt(D) / 2 hops on average, and links a device are constant: its time grows by sqrt(D)
            more than its bytes (section 5.3 of the paper).
        agrees: collectives and growths equal the paper's.
    """

    operator: str
    split: str
    listed: bool
    costs: dict[int, Cost]
    bytes_growth: str
    time_growth: str
    compute_growth: str
    paper_communication: str
    paper_compute: str
    agrees: bool


def check_devices(counts: Sequence[int]) -> None:
    """Raises a ValueError unless they are two or more increasing powers of two, 2 to 64."""
    allowed = [2**n for n in range(1, MOST_DEVICES.bit_length())]
    if len(counts) < 2 or sorted({*counts}) != list(counts) or not {*counts} <= {*allowed}:
        raise InputError(
            f"--devices={','.join(map(str, counts))}: must be two or more increasing numbers of "
            + ", ".join(map(str, allowed))
        )


def table(counts: Sequence[int]) -> list[OperatorGrowth]:
    """Compiles every operator for each number of devices.

    Raises:
        ValueError: `check_devices`; fewer devices than the largest number.
    """
    check_devices(counts)
    use_fake_devices(max(counts))
    return [row(operator, counts) for operator in OPERATORS]


def row(operator: Operator, counts: Sequence[int]) -> OperatorGrowth:
    """Compiles one operator for each number of devices."""
    costs = {count: cost(operator, count) for count in counts}
    kinds = {kind for cost in costs.values() for kind in cost.collectives}
    sent = growth({count: cost.payload_bytes for count, cost in costs.items()})
    exponent = None if sent is None else sent + (0.5 if "all-to-all" in kinds else 0.0)
    compute = growth({count: cost.flops for count, cost in costs.items()})
    time = written(exponent)
    return OperatorGrowth(
        operator.name,
        operator.split,
        operator.listed,
        costs,
        written(sent),
        time,
        written(compute),
        f"{operator.communication} {_short(operator.kinds)}".strip(),
        operator.compute,
        agrees=kinds <= operator.kinds
        and bool(kinds) == bool(operator.kinds)
        and time == operator.communication
        and written(compute) == operator.compute,
    )


def cost(operator: Operator, count: int) -> Cost:
    """Compiles an operator for so many devices."""
    function, arguments = operator.program(jax.devices("cpu")[:count])
    compiled = jax.jit(function).lower(*arguments).compile()
    totals = summary(collectives(compiled.as_text() or ""))
    analysis = compiled.cost_analysis() or {}
    return Cost(
        {kind: total.count for kind, total in totals.items()},
        sum(total.payload_bytes for total in totals.values()),
        analysis["flops"],
    )


def growth(values: dict[int, float]) -> float | None:
    """The exponent p of values ~ D^p, by least squares in logarithms; None where all are 0.

    >>> growth({2: 6.0, 8: 24.0})
    1.0
    """
    if not any(values.values()):
        return None
    assert all(values.values()), values
    slope = np.polyfit(np.log([*values]), np.log([*values.values()]), 1)[0]
    return round(float(slope), 2) + 0.0  # no -0.0


def written(exponent: float | None) -> str:
    """0.5 -> "O(√D)"; exponents within 0.05 of 0, 1/2, 1 are rounded to it."""
    if exponent is None:
        return "0"
    for known, name in ((0.0, "O(1)"), (0.5, "O(√D)"), (1.0, "O(D)")):
        if math.isclose(exponent, known, abs_tol=0.05):
            return name
    return f"O(D^{exponent:.2f})"


def _short(kinds: frozenset[str]) -> str:
    return " or ".join(sorted(ABBREVIATIONS.get(kind, kind) for kind in kinds))


def show(rows: Sequence[OperatorGrowth], console: Console) -> None:
    """Prints the table; a narrow console shows bytes of the fewest and the most devices only."""
    counts = [*rows[0].costs]
    if console.width < _WIDE:
        counts = [counts[0], counts[-1]]
    made = Table(box=SIMPLE_HEAD, title="What partitioned operators send")
    for name in ("operator", "split", "sends"):
        made.add_column(name, no_wrap=True)
    for count in counts:
        made.add_column(f"bytes D={count}", justify="right")
    for name in ("bytes", "time", "paper: time", "FLOPs", "paper: FLOPs", ""):
        made.add_column(name, no_wrap=True)
    for row in rows:
        last = row.costs[counts[-1]].collectives
        sends = ", ".join(f"{n} {ABBREVIATIONS.get(kind, kind)}" for kind, n in last.items())
        made.add_row(
            row.operator,
            row.split,
            sends or "nothing",
            *(f"{row.costs[count].payload_bytes:,}" for count in counts),
            row.bytes_growth,
            row.time_growth,
            row.paper_communication if row.listed else f"({row.paper_communication})",
            row.compute_growth,
            row.paper_compute,
            "=" if row.agrees else "differs",
        )
    console.print(made)
    console.print(
        "bytes: of one device, the larger of input and output. time: on a 2-D torus, by formula "
        "(an all-to-all's bytes take √D / 2 hops). AR all-reduce, AG all-gather, AA all-to-all, CP "
        "collective-permute. (In brackets: not in the paper's table.)"
    )


def save(rows: Sequence[OperatorGrowth], path: Path) -> None:
    """Writes the rows as JSON, with the version of JAX that compiled them."""
    made = [
        {**asdict(row), "costs": {n: c._asdict() for n, c in row.costs.items()}} for row in rows
    ]
    text = json.dumps({"jax": jax.__version__, "rows": made}, ensure_ascii=False, indent=1)
    write_text(path, text + "\n")


def _array(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _add(devices: Sequence[Any]) -> PartitionedFunction:
    x = split(_array(_PART * len(devices)), 0, len(devices), devices=devices)
    return jnp.add, (x, x)


def _matmul(a: int | None, b: int | None, out: int | None = None) -> Callable:
    """AB,BC->AC with one dimension of each operand split (None: replicated), and of the result.

    Dimensions that are split in an operand grow.
    """

    def program(devices: Sequence[Any]) -> PartitionedFunction:
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


def _batch_matmul(devices: Sequence[Any]) -> PartitionedFunction:
    count = len(devices)
    x = split(_array(count, _PART, _PART), 0, count, devices=devices)
    return jnp.matmul, (x, x)


def _reduce(axis: int) -> Callable:
    def program(devices: Sequence[Any]) -> PartitionedFunction:
        count = len(devices)
        x = split(_array(_PART * count, _PART), 0, count, devices=devices)
        return lambda x: x.sum(axis), (x,)

    return program


def _dispatch(devices: Sequence[Any]) -> PartitionedFunction:
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


def _convolution(devices: Sequence[Any]) -> PartitionedFunction:
    count = len(devices)
    x = split(_array(2, 4, 8 * count, 8), 2, count, devices=devices)
    kernel = replicate(_array(3, 3, 4, 4), devices=devices)

    def function(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW")
        )

    return function, (x, kernel)


_AG_OR_CP = frozenset({"all-gather", "collective-permute"})
_AR = frozenset({"all-reduce"})
_NONE: frozenset[str] = frozenset()

OPERATORS = (
    Operator("Add(A,A->A)", "A", "O(1)", "0", _NONE, _add),
    Operator("Matmul(AB,BC->AC)", "B", "O(1)", "O(1)", _AR, _matmul(1, 0)),
    Operator("Matmul(AB,BC->AC)", "A", "O(1)", "0", _NONE, _matmul(0, None, 0)),
    Operator("Matmul(AB,BC->AC)", "A,B", "O(D)", "O(D)", _AG_OR_CP, _matmul(0, 0, 0)),
    Operator("Matmul(AB,BC->AC)", "A,C", "O(D)", "O(D)", _AG_OR_CP, _matmul(0, 1, 0)),
    Operator("Matmul(BIJ,BJK->BIK)", "B", "O(1)", "0", _NONE, _batch_matmul, listed=False),
    Operator("Reduce(AB->A)", "A", "O(1)", "0", _NONE, _reduce(1)),
    Operator("Reduce(AB->B)", "A", "O(1)", "O(1)", _AR, _reduce(0)),
    Operator(
        "Einsum(GSEC,GSM->EGCM)", "G,E", "O(1)", "O(√D)", frozenset({"all-to-all"}), _dispatch
    ),
    Operator(
        "Convolution(BIXY,xyIO->BOXY)",
        "X",
        "O(1)",
        "O(1)",
        frozenset({"collective-permute"}),
        _convolution,
    ),
)
