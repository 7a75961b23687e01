"""Which collectives a compiled program runs, how often and over how many bytes.

Reads the text of an optimised HLO module (`compiled.as_text()`), of any backend. The text of a
large model is hundreds of megabytes: it is read once, line by line, and only what matters is taken
apart.

Loops: a collective in the body of a `while` counts as often as the loop goes round. XLA writes the
number beside the loop on CPU and GPU; on TPU it follows from start, step and limit of the counter.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from m4.core.hlo_products import MARKS, product_flops
from m4.core.hlo_types import INSTRUCTION, elements, type_bytes
from m4.core.replica_groups import Groups, read_groups, read_pairs

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
        name, computation: where it stands in the text.
        operand_bytes, result_bytes: what one run takes in and gives out on one device. An
            all-gather of n devices gives n times what it takes in, a reduce-scatter the n-th part.
        groups: the devices that work together; of a collective-permute (source, target) pairs.
        times: runs in one run of the program. Each branch of a conditional counts as taken.
        loop_unknown: it is in a loop whose length the text does not tell; it counts once there.
        source: the operation of the traced program that it comes from ("" where it is not told).
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

    @property
    def payload_bytes(self) -> int:
        """The larger of what goes in and what comes out, of one run."""
        return max(self.operand_bytes, self.result_bytes)

    @property
    def sent_bytes(self) -> float:
        """What one device sends in one run, by the algorithms that send least.

        For n devices, a ring's: all-reduce 2 (n - 1) / n of its operand, reduce-scatter and
        all-to-all (n - 1) / n, all-gather n - 1 times, a permutation all of it.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.operand_bytes)
        n = len(self.groups[0])
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
    """Kind -> its total, loops multiplied out; only kinds that there are, in `KINDS`' order."""
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
        ValueError: it is no HLO module, or one that writes replica groups or types in an unknown
            way.
    """
    return measure(hlo).collectives


@dataclass(frozen=True)
class Measured:
    """What a compiled program does in one run, on one device.

    Attributes:
        collectives: as `collectives` gives them.
        cycles: of the device's clock, by the TPU compiler's own estimate of each operation, loops
            multiplied out; 0 where it writes none (CPU, GPU). It estimates no collectives.
        uncosted: how many operations run that the compiler has no estimate of: kernels of others,
            and where it writes the largest number there is.
        flops: operations of matrix products (`m4.core.hlo_products`), loops multiplied out.
        unread: what runs and may multiply too, but cannot be counted: kind -> how often.
        loops_unknown: something is in a loop whose length the text does not tell.
    """

    collectives: list[Collective]
    cycles: int
    uncosted: int
    flops: int
    unread: dict[str, int]
    loops_unknown: bool


def measure(hlo: str | Iterable[str]) -> Measured:
    """`collectives` and the cycles of everything else; the same arguments and errors."""
    module = _read(_lines(hlo) if isinstance(hlo, str) else hlo)
    # A computation stands before those that call it: backwards, all callers are done before it.
    times: dict[str, int] = defaultdict(int, {module.entry: 1})
    unknown: set[str] = set()
    for name, computation in reversed(module.computations.items()):
        for callee, runs in computation.calls:
            times[callee] += times[name] * (1 if runs is None else runs)
            if runs is None or name in unknown:
                unknown.add(callee)
    used = {name: each for name, each in module.computations.items() if times[name]}
    unread = Counter[str]()
    for name, computation in used.items():
        unread.update({kind: times[name] * n for kind, n in computation.unread.items()})
    return Measured(
        [
            Collective(**vars(found), times=times[name], loop_unknown=name in unknown)
            for name, computation in used.items()
            for found in computation.collectives
        ],
        sum(times[name] * computation.cycles for name, computation in used.items()),
        sum(times[name] * computation.uncosted for name, computation in used.items()),
        sum(times[name] * computation.flops for name, computation in used.items()),
        dict(unread),
        any(name in unknown for name in used),
    )


@dataclass
class _Found:
    """A `Collective` without what its callers decide."""

    kind: str
    name: str
    computation: str
    operand_bytes: int
    result_bytes: int
    groups: Groups
    source: str


@dataclass
class _Computation:
    collectives: list[_Found] = field(default_factory=list)
    cycles: int = 0
    uncosted: int = 0
    flops: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    calls: list[tuple[str, int | None]] = field(default_factory=list)  # None: unknown how often
    # Name -> (opcode, what is in its parentheses, line); of scalars and tuples alone, for the
    # counters of loops.
    scalars: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    root: str = ""


@dataclass
class _Module:
    computations: dict[str, _Computation]
    entry: str


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_KIND = re.compile(rf"({'|'.join(KINDS)})(-start)?")
_NAME = re.compile(r"%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=([^,]+))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SOURCE = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# 2^63 - 1 in the text; no operation takes a century.
_NO_ESTIMATE = 2**62
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


def _lines(text: str) -> Iterator[str]:
    """The lines of a text, one at a time; `splitlines` would copy it whole."""
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
    own: list[str] = []  # the lines of the current one, and those that can be products
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
        # Cheap looks before the regular expressions: nearly every line is none of these.
        seems = " all-" in line or " collective-" in line or "reduce-s" in line or "-all-" in line
        calls = "calls=" in line or "to_apply=" in line
        if seems and (found := _collective(line, name, devices)):
            current.collectives.append(found)
        elif calls or " while(" in line or " conditional(" in line:
            current.calls += _calls(line, current, computations)
        elif "= s32[]" in line or "= s64[]" in line or "= pred[]" in line or ") tuple(" in line:
            _scalar(line, current)
    if not entry:
        raise ValueError("not the text of an HLO module: there is no line that begins with ENTRY")
    return _Module(computations, entry)


def _collective(line: str, computation: str, devices: int) -> _Found | None:
    """What the line says; None where it is another operation, or only calls one."""
    instruction = INSTRUCTION.match(line)
    if instruction is None or (opcode := _KIND.fullmatch(instruction[3])) is None:
        return None
    if "calls=" in line:  # an asynchronous wrapper; the operation itself is in what it calls
        return None
    name, kind = instruction[1], opcode[1]
    groups = read_pairs(line) if kind == "collective-permute" else read_groups(line, devices)
    # The start of an asynchronous one gives (operand, result, ...); an all-reduce's the result.
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
        # So the TPU's compiler writes a reduce-scatter: a fusion of all-reduce and slice.
        kind, result = "reduce-scatter", operand // len(groups[0])
    source = _SOURCE.search(line)
    return _Found(kind, name, computation, operand, result, groups, source[1] if source else "")


def _calls(
    line: str, caller: _Computation, known: Mapping[str, _Computation]
) -> list[tuple[str, int | None]]:
    """(computation, how often the line runs it): those in which a collective can be."""
    instruction = INSTRUCTION.match(line) if " while(" in line else None
    if instruction and instruction[3] == "while":
        body, condition = _named(line, "body="), _named(line, "condition=")
        if not any(_matters(known.get(name)) for name in (body, condition)):
            return []
        trips = _trip_count(line, instruction[4], caller, known[condition], known[body])
        # The condition is asked once more than the body runs.
        return [(body, trips), (condition, None if trips is None else trips + 1)]
    names = [_named(line, "calls="), _named(line, "to_apply=")]
    if " conditional(" in line:
        for several, one in _BRANCHES.findall(line):
            names += [name.strip().lstrip("%") for name in (several or one).split(",")]
    return [(name, 1) for name in names if _matters(known.get(name))]


def _named(line: str, attribute: str) -> str:
    """The computation that an attribute names; "" without it."""
    place = line.find(attribute)
    found = _NAME.match(line, place + len(attribute)) if place >= 0 else None
    return found[1] if found else ""


def _matters(computation: _Computation | None) -> bool:
    if computation is None:
        return False
    counted = computation.cycles or computation.uncosted or computation.flops or computation.unread
    return bool(computation.collectives or computation.calls or counted)


def _scalar(line: str, computation: _Computation) -> None:
    found = INSTRUCTION.match(line)
    if found and found[3] in ("constant", "copy", "add", "get-tuple-element", "compare", "tuple"):
        computation.scalars[found[1]] = (found[3], found[4], line)
        if line.lstrip().startswith("ROOT "):
            computation.root = found[1]


def _trip_count(
    line: str, operand: str, caller: _Computation, condition: _Computation, body: _Computation
) -> int | None:
    """How often the body runs: as XLA says, or for (i = start; i < limit; i += step); or None."""
    if told := _TRIPS.search(line):
        return int(told[1])
    opcode, compared, text = condition.scalars.get(condition.root, ("", "", ""))
    if opcode != "compare" or "direction=LT" not in text:
        return None
    counter, limit = _operands(compared)
    index = _element(condition, counter)
    first = caller.scalars.get(_operands(operand)[-1], ("", "", ""))
    last = body.scalars.get(body.root, ("", "", ""))
    if index is None or first[0] != "tuple" or last[0] != "tuple":
        return None
    start, end = _constant(caller, _operands(first[1])[index]), _constant(condition, limit)
    opcode, added, _ = body.scalars.get(_operands(last[1])[index], ("", "", ""))
    if start is None or end is None or opcode != "add":
        return None
    steps = [_constant(body, name) for name in _operands(added)]
    step = next((step for step in steps if step is not None), 0)
    if step < 1 or index not in [_element(body, name) for name in _operands(added)]:
        return None
    return max(0, -((start - end) // step))


def _operands(text: str) -> list[str]:
    """Names of operands, where each may have its type before it."""
    return re.findall(r"%([\w.\-]+)", text) or [name.strip() for name in text.split(",")]


def _constant(computation: _Computation, name: str) -> int | None:
    opcode, inside, _ = computation.scalars.get(name, ("", "", ""))
    if opcode == "copy":
        return _constant(computation, _operands(inside)[-1])
    return int(inside) if opcode == "constant" and re.fullmatch(r"-?\d+", inside) else None


def _element(computation: _Computation, name: str) -> int | None:
    """Which element of the computation's parameter it is."""
    opcode, inside, line = computation.scalars.get(name, ("", "", ""))
    if opcode == "copy":
        return _element(computation, _operands(inside)[-1])
    found = re.search(r"\bindex=(\d+)", line)
    return int(found[1]) if opcode == "get-tuple-element" and found else None
