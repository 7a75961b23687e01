"""Which collectives a compiled program runs, how often and over how many bytes.

Reads the text of an optimised HLO module (`compiled.as_text()`), of any backend. The text of a
large model is hundreds of megabytes: it is read once, line by line, and only lines that matter are
parsed. A collective in the body of a `while` counts once for each iteration (`m4.plan.hlo.loops`).
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from m4.plan.hlo.loops import Scalars, trip_count
from m4.plan.hlo.products import MARKS, product_flops
from m4.plan.hlo.replica_groups import Groups, read_groups, read_pairs, read_slices
from m4.plan.hlo.types import INSTRUCTION, elements, type_bytes

# https://openxla.org/xla/operation_semantics; each also with "-start" where it is asynchronous.
KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
    "ragged-all-to-all",
)


@dataclass(frozen=True)
class Collective:
    """One collective of a program, as one device sees it.

    Attributes:
        kind: one of `KINDS`.
        name, computation: its place in the text.
        operand_bytes, result_bytes: of one run on one device. The result of an all-gather of n
            devices is n times its operand, of a reduce-scatter 1/n.
        groups: the devices that exchange; of a collective-permute (source, target) pairs.
        times: runs in one run of the program. Each branch of a conditional counts as taken.
        loop_unknown: in a loop whose length is not in the text; it counts once there.
        source: the operation of the traced program that it comes from ("": not in the text).
        slices: TPU slices that exchange over the data center's network; 1: it stays inside one.
            The text has the program of one slice, whose devices count from 0. Between slices
            `groups` number the devices slice by slice.
    """

    kind: str
    name: str
    computation: str
    operand_bytes: int
    result_bytes: int
    groups: Groups
    times: int
    loop_unknown: bool
    source: str
    slices: int = 1

    @property
    def payload_bytes(self) -> int:
        """The larger of operand and result, of one run."""
        return max(self.operand_bytes, self.result_bytes)

    @property
    def sent_bytes(self) -> float:
        """What one device sends in one run, by the algorithms that send least.

        For n devices, in a ring: all-reduce 2 (n - 1) / n of its operand, reduce-scatter and
        all-to-all (n - 1) / n, all-gather n - 1 times, a permutation all of it. Between n slices
        the same: what leaves a device's slice.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.operand_bytes)
        n = self.slices if self.slices > 1 else len(self.groups[0])
        if self.kind == "all-gather":
            return float((n - 1) * self.operand_bytes)
        return (2 if self.kind == "all-reduce" else 1) * self.operand_bytes * (n - 1) / n


@dataclass(frozen=True)
class Total:
    """All collectives of one kind in one run of a program; bytes are those of one device."""

    count: int
    operand_bytes: int
    result_bytes: int
    payload_bytes: int
    sent_bytes: float


def summary(found: Iterable[Collective]) -> dict[str, Total]:
    """Kind -> its total, loops multiplied out; only kinds that occur, in `KINDS`' order."""
    by_kind: dict[str, list[Collective]] = defaultdict(list)
    for each in found:
        by_kind[each.kind].append(each)
    return {
        kind: Total(
            sum(c.times for c in by_kind[kind]),
            sum(c.times * c.operand_bytes for c in by_kind[kind]),
            sum(c.times * c.result_bytes for c in by_kind[kind]),
            sum(c.times * c.payload_bytes for c in by_kind[kind]),
            sum(c.times * c.sent_bytes for c in by_kind[kind]),
        )
        for kind in KINDS
        if kind in by_kind
    }


def collectives(hlo: str | Iterable[str]) -> list[Collective]:
    """The collectives of an optimised HLO module, in the order of its text.

    Args:
        hlo: the module's text, or its lines (a file).

    Raises:
        ValueError: not an HLO module, or replica groups or types in an unknown notation.
    """
    return measure(hlo).collectives


@dataclass(frozen=True)
class Traffic:
    """What a compiled program does in one run, on one device.

    Attributes:
        collectives: as `collectives` gives them.
        cycles: of the device's clock, by the TPU compiler's estimate of each operation, loops
            multiplied out, without collectives; 0 where it writes none (CPU, GPU).
        uncosted: how many operations run without an estimate: custom kernels, and where the
            compiler writes the largest integer.
        flops: operations of matrix products (`m4.plan.hlo.products`), loops multiplied out.
        unread: operations that are not counted and may be products: kind -> how often they run.
        loops_unknown: something is in a loop whose length is not in the text.
    """

    collectives: list[Collective]
    cycles: int
    uncosted: int
    flops: int
    unread: dict[str, int]
    loops_unknown: bool


def measure(hlo: str | Iterable[str]) -> Traffic:
    """`collectives`, and cycles and products of all operations; the same arguments and errors."""
    module = _read(_lines(hlo) if isinstance(hlo, str) else hlo)
    times = _times(module)
    return _measured(module, (times.once, False), (times.iteration, True))


class ByLoop(NamedTuple):
    """A program with a loop whose length the data decide, such as a beam search.

    Attributes:
        once: what is outside of such loops. iteration: what is in them, one iteration of each.
        loops: how many there are, nested ones included.
    """

    once: Traffic
    iteration: Traffic
    loops: int


def measure_by_loop(hlo: str | Iterable[str]) -> ByLoop:
    """`measure`, separately of what runs once and of what is in loops of unknown length."""
    module = _read(_lines(hlo) if isinstance(hlo, str) else hlo)
    times = _times(module)
    once = _measured(module, (times.once, False))
    return ByLoop(once, _measured(module, (times.iteration, True)), times.loops)


@dataclass
class _Found:
    """A `Collective` without what the callers of its computation decide."""

    kind: str
    name: str
    computation: str
    operand_bytes: int
    result_bytes: int
    groups: Groups
    source: str
    slices: int = 1


@dataclass
class _Computation:
    collectives: list[_Found] = field(default_factory=list)
    cycles: int = 0
    uncosted: int = 0
    flops: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    calls: list[tuple[str, int | None]] = field(default_factory=list)  # None: unknown how often
    scalars: Scalars = field(default_factory=Scalars)


@dataclass
class _Module:
    computations: dict[str, _Computation]
    entry: str


class _Times(NamedTuple):
    """How often each computation runs, outside and inside of loops of unknown length."""

    once: Mapping[str, int]
    iteration: Mapping[str, int]
    loops: int


def _times(module: _Module) -> _Times:
    # In the text a computation precedes its callers: backwards, all callers are done before it.
    once: dict[str, int] = defaultdict(int, {module.entry: 1})
    iteration: dict[str, int] = defaultdict(int)
    loops = 0
    for name, computation in reversed(module.computations.items()):
        runs_at_all = once[name] + iteration[name] > 0
        for callee, runs in computation.calls:
            if runs is None:
                iteration[callee] += once[name] + iteration[name]
                loops += runs_at_all
            else:
                once[callee] += once[name] * runs
                iteration[callee] += iteration[name] * runs
    return _Times(once, iteration, loops // 2)  # a loop calls its body and its condition


def _measured(module: _Module, *counted: tuple[Mapping[str, int], bool]) -> Traffic:
    """Sums of (computation -> how often it runs, whether in loops of unknown length)."""
    collectives: list[Collective] = []
    unread = Counter[str]()
    cycles = uncosted = flops = 0
    unknown = False
    for name, computation in module.computations.items():
        for times, in_unknown in ((of[name], in_unknown) for of, in_unknown in counted):
            if not times:
                continue
            unknown |= in_unknown
            collectives += [
                Collective(**vars(found), times=times, loop_unknown=in_unknown)
                for found in computation.collectives
            ]
            unread.update({kind: times * n for kind, n in computation.unread.items()})
            cycles += times * computation.cycles
            uncosted += times * computation.uncosted
            flops += times * computation.flops
    return Traffic(collectives, cycles, uncosted, flops, dict(unread), unknown)


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_KIND = re.compile(rf"({'|'.join(KINDS)})(-start)?")
_NAME = re.compile(r"%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=([^,]+))")
_SOURCE = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# The text has 2^63 - 1 there; no operation takes a century.
_NO_ESTIMATE = 2**62
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


def _lines(text: str) -> Iterator[str]:
    """The lines of a text, one at a time; `splitlines` would copy all of it."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def _read(lines: Iterable[str]) -> _Module:
    devices, entry, name = 1, "", ""
    current = _Computation()
    computations: dict[str, _Computation] = {}
    own: list[str] = []  # lines of the current computation; products: those that can be one
    products: list[str] = []
    for line in lines:
        line = line.rstrip("\n")
        if not line.startswith(" "):
            if line.startswith("HloModule"):
                devices = math.prod(int(n) for n in _DEVICES.findall(line))
            elif found := _HEADER.match(line):
                name, current, own, products = found[2], _Computation(), [], []
                computations[name] = current
                entry = name if found[1] else entry
            elif products:  # the computation ends
                current.flops, current.unread = product_flops(products, own)
                products = []
            continue
        own.append(line)
        if any(mark in line for mark in MARKS):
            products.append(line)
        if '"estimated_cycles"' in line and (cycles := _CYCLES.search(line)):
            known = int(cycles[1]) < _NO_ESTIMATE
            current.cycles += int(cycles[1]) if known else 0
            current.uncosted += not known
        current.uncosted += '"tpu_custom_call"' in line
        # Substring checks before the regular expressions: nearly every line is none of these.
        seems = " all-" in line or " collective-" in line or "reduce-s" in line or "-all-" in line
        calls = "calls=" in line or "to_apply=" in line
        if seems and (found := _collective(line, name, devices)):
            current.collectives.append(found)
        elif " send(" in line and _BETWEEN in line:
            current.collectives.append(_between_slices(line, name, devices))
        elif calls or " while(" in line or " conditional(" in line:
            current.calls += _calls(line, current, computations)
        elif "= s32[]" in line or "= s64[]" in line or "= pred[]" in line or ") tuple(" in line:
            current.scalars.read(line)
    if not entry:
        raise ValueError("not the text of an HLO module: no line begins with ENTRY")
    return _Module(computations, entry)


def _collective(line: str, computation: str, devices: int) -> _Found | None:
    """The line's collective; None where it is another operation, or only calls one."""
    instruction = INSTRUCTION.match(line)
    if instruction is None or (opcode := _KIND.fullmatch(instruction[3])) is None:
        return None
    if "calls=" in line:  # an asynchronous wrapper; the operation is in its callee
        return None
    name, kind = instruction[1], opcode[1]
    groups = read_pairs(line) if kind == "collective-permute" else read_groups(line, devices)
    # The start of an asynchronous one returns (operand, result, ...); an all-reduce's the result.
    parts = elements(instruction[2])
    if opcode[2] and kind != "all-reduce" and len(parts) > 1:
        operand, result = type_bytes(parts[0]), type_bytes(parts[1])
    else:
        operand = result = type_bytes(instruction[2])
        if kind == "all-gather":
            operand = result // len(groups[0])
        if kind == "reduce-scatter":
            operand = result * len(groups[0])
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        # The TPU compiler's reduce-scatter: a fusion of all-reduce and slice.
        kind, result = "reduce-scatter", operand // len(groups[0])
    return _Found(kind, name, computation, operand, result, groups, _source(line))


# libtpu's collectives between slices: a send to the host and what its runtime does with it.
_BETWEEN = "_xla_megascale_transfer_type="
_TRANSFER = re.compile(rf'{_BETWEEN}"(\w+)"')
_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "REDUCE_SCATTER": "reduce-scatter",
    "ONE_TO_ONE": "collective-permute",
}


def _between_slices(line: str, computation: str, devices: int) -> _Found:
    """devices: of one slice. ValueError: an unknown kind of transfer."""
    instruction, transfer = INSTRUCTION.match(line), _TRANSFER.search(line)
    if instruction is None or transfer is None or transfer[1] not in _TRANSFERS:
        raise ValueError(f"HLO: no readable transfer between slices in '{line.strip()[:200]}'")
    kind, operand = _TRANSFERS[transfer[1]], type_bytes(elements(instruction[2])[0])
    groups, slices = read_slices(line, devices)
    of_kind = {"all-gather": operand * slices, "reduce-scatter": operand // slices}
    result, name = of_kind.get(kind, operand), instruction[1]
    return _Found(kind, name, computation, operand, result, groups, _source(line), slices)


def _source(line: str) -> str:
    return found[1] if (found := _SOURCE.search(line)) else ""


def _calls(
    line: str, caller: _Computation, known: Mapping[str, _Computation]
) -> list[tuple[str, int | None]]:
    """(computation, how often the line runs it), of those that contain anything to count."""
    instruction = INSTRUCTION.match(line) if " while(" in line else None
    if instruction and instruction[3] == "while":
        body, condition = _named(line, "body="), _named(line, "condition=")
        if not any(_matters(known.get(name)) for name in (body, condition)):
            return []
        scalars = (each.scalars for each in (caller, known[condition], known[body]))
        trips = trip_count(line, instruction[4], *scalars)
        # The condition runs once more than the body.
        return [(body, trips), (condition, None if trips is None else trips + 1)]
    names = [_named(line, "calls="), _named(line, "to_apply=")]
    if " conditional(" in line:
        for several, one in _BRANCHES.findall(line):
            names += [name.strip().lstrip("%") for name in (several or one).split(",")]
    return [(name, 1) for name in names if _matters(known.get(name))]


def _named(line: str, attribute: str) -> str:
    """The computation that an attribute names; "": the line has no such attribute."""
    place = line.find(attribute)
    found = _NAME.match(line, place + len(attribute)) if place >= 0 else None
    return found[1] if found else ""


def _matters(computation: _Computation | None) -> bool:
    if computation is None:
        return False
    counted = computation.cycles or computation.uncosted or computation.flops or computation.unread
    return bool(computation.collectives or computation.calls or counted)
