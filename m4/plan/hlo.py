"""Reader of a compiled program's text: its collectives and estimated cycles.

The text is an optimised HLO module (`compiled.as_text()`) of any backend. A large model's has
hundreds of megabytes: it is read once, line by line, and only lines that matter are parsed. The
body of a `while` counts once per iteration, while XLA's own `cost_analysis()` counts it once.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from m4.model.dispatch.dropless import ROUNDS

# https://openxla.org/xla/operation_semantics; asynchronous ones end in "-start".
KINDS = (
    *("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"),
    *("collective-broadcast", "ragged-all-to-all"),
)
Groups = tuple[tuple[int, ...], ...]


class Collective(NamedTuple):
    """One collective of a program, as one device sees it."""

    kind: str  # one of `KINDS`
    name: str  # name in the text
    # Bytes per run and device.
    operand_bytes: int
    result_bytes: int
    groups: Groups  # Devices that exchange; for a collective-permute (source, target) pairs.
    # Number of TPU slices that exchange over the data center's network, or 1 inside the slice whose
    # program the text is. Between slices, `groups` number the devices slice by slice.
    slices: int = 1
    # Number of runs in one run of the program. Each branch of a conditional counts as taken, and a
    # loop of unknown length counts as one iteration.
    times: int = 1

    @property
    def payload_bytes(self) -> int:
        """The larger of operand and result, per run."""
        return max(self.operand_bytes, self.result_bytes)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends per run, by the algorithms that send least.

        In a ring of n devices, an all-reduce sends 2 (n - 1) / n of its operand, reduce-scatter
        and all-to-all (n - 1) / n, an all-gather n - 1 times it, a permutation all of it. Between
        n slices, the same holds for what leaves a device's slice.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.operand_bytes)
        n = self.slices if self.slices > 1 else len(self.groups[0])
        if self.kind == "all-gather":
            return float((n - 1) * self.operand_bytes)
        return (2 if self.kind == "all-reduce" else 1) * self.operand_bytes * (n - 1) / n


class Total(NamedTuple):
    """All collectives of one kind in one run of a program, with bytes per device."""

    count: int
    operand_bytes: int
    result_bytes: int
    payload_bytes: int
    sent_bytes: float


def summary(found: Iterable[Collective]) -> dict[str, Total]:
    """Returns kind -> total, with loops multiplied out, for kinds that occur."""
    by_kind: dict[str, list[tuple[Any, ...]]] = {}
    for each in found:
        sizes = each.operand_bytes, each.result_bytes, each.payload_bytes, each.sent_bytes
        rows = by_kind.setdefault(each.kind, [])
        rows.append((each.times, *(each.times * size for size in sizes)))
    columns = {kind: zip(*by_kind[kind], strict=True) for kind in KINDS if kind in by_kind}
    return {kind: Total(*map(sum, each)) for kind, each in columns.items()}


@dataclass
class Work:
    """The work per device and run of a program or a part of it."""

    collectives: list[Collective] = field(default_factory=list)  # in text order
    # Cycles of the device's clock without collectives, by the TPU compiler's estimate of each
    # operation; 0 if it writes none (CPU, GPU).
    cycles: int = 0
    # Runs of operations without an estimate: custom kernels, and those with the largest integer as
    # the estimate.
    uncosted: int = 0
    kernels: int = 0  # TPU custom kernels among the uncosted


class Program(NamedTuple):
    """The work of a program with data-dependent loops, such as a beam search."""

    once: Work  # work outside of such loops
    iteration: Work  # work in one iteration of each of them
    whole: Work  # both together
    loops: int  # number of such loops, nested ones included


def collectives(hlo: str) -> list[Collective]:
    """Returns the collectives in the text of an HLO module."""
    return read(hlo).whole.collectives


def read(hlo: str) -> Program:
    """Reads the text of an optimised HLO module."""
    # One line at a time: `splitlines` would copy all of the text.
    computations, entry = _computations(found[0] for found in re.finditer(".+", hlo))
    once: dict[str, int] = defaultdict(int, {entry: 1})
    iteration: dict[str, int] = defaultdict(int)
    loops = 0
    # A computation precedes its callers in the text, so backwards all callers come before it.
    for name, computation in reversed(computations.items()):
        for callee, runs in computation.calls:
            if runs is None:
                iteration[callee] += once[name] + iteration[name]
                loops += once[name] + iteration[name] > 0
            else:
                once[callee] += once[name] * runs
                iteration[callee] += iteration[name] * runs
    return Program(
        _work(computations, once),
        _work(computations, iteration),
        _work(computations, once, iteration),
        loops // 2,  # a loop calls its body and its condition
    )


# ------------------------------------------------------------------------------ computations


class _Instruction(NamedTuple):
    """A scalar or tuple, such as a loop's counter."""

    opcode: str = ""
    inside: str = ""  # the text in its parentheses
    line: str = ""

    @property
    def operands(self) -> list[str]:
        """Names of the operands, each of which may follow its type."""
        found = re.findall(r"%([\w.\-]+)", self.inside)
        return found or [name.strip() for name in self.inside.split(",")]


@dataclass
class _Computation(Work):
    """A computation of the module: one run without its callees."""

    # Name of a callee, and how often it runs, or None if the text does not say.
    calls: list[tuple[str, int | None]] = field(default_factory=list)
    scalars: dict[str, _Instruction] = field(default_factory=dict)
    root: str = ""  # name of the result
    multiplies: bool = False  # whether it has matrix products

    def scalar(self, name: str) -> _Instruction:
        """Returns the instruction of that name, looking through copies; an empty one if unknown."""
        found = self.scalars.get(name, _Instruction())
        return self.scalar(found.operands[-1]) if found.opcode == "copy" else found

    def constant(self, name: str) -> int | None:
        opcode, inside, _ = self.scalar(name)
        return int(inside) if opcode == "constant" and re.fullmatch(r"-?\d+", inside) else None

    def element(self, name: str) -> int | None:
        """Returns the index of a value in the tuple that is the computation's parameter."""
        opcode, _, line = self.scalar(name)
        found = re.search(r"\bindex=(\d+)", line)
        return int(found[1]) if opcode == "get-tuple-element" and found else None


def _work(computations: Mapping[str, _Computation], *counted: Mapping[str, int]) -> Work:
    """Sums the work of computations, by how often each runs."""
    work = Work()
    for name, part in computations.items():
        for times in filter(None, (runs[name] for runs in counted)):
            work.collectives += [each._replace(times=times) for each in part.collectives]
            work.cycles += times * part.cycles
            work.uncosted += times * part.uncosted
            work.kernels += times * part.kernels
    return work


# "  ROOT %name = type opcode(operands": four groups, operands up to the first closing parenthesis.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(([^)]*)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_CALLEE = re.compile(r"\b(calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=([^,]+))")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# The text has 2^63 - 1 for unknown estimates; no operation takes a century.
_NO_ESTIMATE = 2**62
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_SCALARS = ("constant", "copy", "add", "get-tuple-element", "compare", "tuple")
# Substrings of lines that can be products, collectives, calls, scalars or tuples. Most lines are
# none of these, and substrings are found faster than regular expressions.
_PRODUCTS = (" dot(", " convolution(", " custom-call(", "-dot(")
_COLLECTIVES = (" all-", " collective-", "reduce-s", "-all-")
_CALLS = ("calls=", "to_apply=", " while(", " conditional(")
_SCALAR = ("= s32[]", "= s64[]", "= pred[]", ") tuple(")


def _computations(lines: Iterable[str]) -> tuple[dict[str, _Computation], str]:
    """Returns the module's computations by name, and the entry's name."""
    devices, entry, name = 1, "", ""
    current = _Computation()
    found: dict[str, _Computation] = {}
    for line in lines:
        if not line.startswith(" "):
            if line.startswith("HloModule"):
                devices = math.prod(int(n) for n in _DEVICES.findall(line))
            elif header := _HEADER.match(line):
                name, current = header[2], _Computation()
                found[name] = current
                entry = name if header[1] else entry
            continue
        current.multiplies |= any(mark in line for mark in _PRODUCTS)
        if '"estimated_cycles"' in line and (cycles := _CYCLES.search(line)):
            known = int(cycles[1]) < _NO_ESTIMATE
            current.cycles += int(cycles[1]) if known else 0
            current.uncosted += not known
        kernel = '"tpu_custom_call"' in line
        current.uncosted += kernel
        current.kernels += kernel
        seems = any(mark in line for mark in _COLLECTIVES)
        if seems and (collective := _collective(line, name, devices)):
            current.collectives.append(collective)
        elif " send(" in line and _BETWEEN in line:
            current.collectives.append(_between_slices(line, devices))
        elif any(mark in line for mark in _CALLS):
            current.calls += _calls(line, current, found)
        elif any(mark in line for mark in _SCALAR):
            instruction = _INSTRUCTION.match(line)
            if instruction and instruction[3] in _SCALARS:
                made = _Instruction(instruction[3], instruction[4], line)
                current.scalars[instruction[1]] = made
                if line.lstrip().startswith("ROOT "):
                    current.root = instruction[1]
    if not entry:
        raise ValueError("not the text of an HLO module: no line begins with ENTRY")
    return found, entry


def _calls(
    line: str, caller: _Computation, known: Mapping[str, _Computation]
) -> list[tuple[str, int | None]]:
    """Returns the computations called in a line that contain anything to count."""
    named = dict(reversed(_CALLEE.findall(line)))
    names = [named[kind] for kind in ("calls", "to_apply", "body", "condition") if kind in named]
    if " conditional(" in line:
        for several, one in _BRANCHES.findall(line):
            names += [name.strip().lstrip("%") for name in (several or one).split(",")]
    if not any(
        of.collectives or of.calls or of.cycles or of.uncosted or of.multiplies
        for name in names
        if (of := known.get(name))
    ):
        return []
    instruction = _INSTRUCTION.match(line) if " while(" in line else None
    if instruction and instruction[3] == "while":
        body, condition = named["body"], named["condition"]
        start = _Instruction("while", instruction[4]).operands[-1]
        trips = _trip_count(line, start, caller, known[condition], known[body])
        # A condition runs once more than its body.
        return [(body, trips), (condition, None if trips is None else trips + 1)]
    return [(name, 1) for name in names if name in known]


# ------------------------------------------------------------------------------- loops

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ROUNDS = re.compile(rf'{ROUNDS}\)*/while"')


def _trip_count(
    line: str, start: str, caller: _Computation, condition: _Computation, body: _Computation
) -> int | None:
    """Returns how often a loop's body runs, or None if the text does not say."""
    if noted := _TRIPS.search(line):  # for CPU and GPU
        return int(noted[1])
    if _ROUNDS.search(line):  # rows travel to experts in it: one round, as for balanced routing
        return 1
    # For TPU, the number follows from the loop's form, for (i = start; i < limit; i += step).
    compared, first = condition.scalar(condition.root), caller.scalar(start)
    last = body.scalar(body.root)
    if "direction=LT" not in compared.line or (first.opcode, last.opcode) != ("tuple", "tuple"):
        return None
    counter, limit = compared.operands
    if (index := condition.element(counter)) is None:
        return None
    added = body.scalar(last.operands[index])
    begin, end = caller.constant(first.operands[index]), condition.constant(limit)
    if begin is None or end is None or added.opcode != "add":
        return None
    step = next(filter(None, map(body.constant, added.operands)), 0)
    if step < 1 or index not in map(body.element, added.operands):
        return None
    return max(0, -((begin - end) // step))


# ------------------------------------------------------------------------- collectives

_KIND = re.compile(rf"({'|'.join(KINDS)})(-start)?")
# libtpu's collectives between slices: a send to the host, and what its runtime does with it.
_BETWEEN = "_xla_megascale_transfer_type="
_TRANSFER = re.compile(rf'{_BETWEEN}"(\w+)"')
_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "REDUCE_SCATTER": "reduce-scatter",
    "ONE_TO_ONE": "collective-permute",
}


def _collective(line: str, computation: str, devices: int) -> Collective | None:
    """Returns the line's collective, or None for another operation or a call."""
    instruction = _INSTRUCTION.match(line)
    if instruction is None or (opcode := _KIND.fullmatch(instruction[3])) is None:
        return None
    if "calls=" in line:  # an asynchronous wrapper; its callee has the operation
        return None
    name, kind, groups = instruction[1], opcode[1], read_groups(line, devices)
    # An asynchronous start returns (operand, result, ...), but that of an all-reduce the result.
    parts = _elements(instruction[2])
    if opcode[2] and kind != "all-reduce" and len(parts) > 1:
        operand, result = type_bytes(parts[0]), type_bytes(parts[1])
    else:
        operand = result = type_bytes(instruction[2])
        if kind == "all-gather":
            operand = result // len(groups[0])
        if kind == "reduce-scatter":
            operand = result * len(groups[0])
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        # The TPU compiler's reduce-scatter is a fusion of all-reduce and slice.
        kind, result = "reduce-scatter", operand // len(groups[0])
    return Collective(kind, name, operand, result, groups)


def _between_slices(line: str, devices: int) -> Collective:
    """Returns the collective between slices of `devices` devices. Raises ValueError if unknown."""
    instruction, transfer = _INSTRUCTION.match(line), _TRANSFER.search(line)
    target = _TARGET.search(line)
    if not (instruction and transfer and target) or transfer[1] not in _TRANSFERS:
        raise ValueError(f"HLO: no readable transfer between slices in '{line.strip()[:200]}'")
    kind, operand = _TRANSFERS[transfer[1]], type_bytes(_elements(instruction[2])[0])
    groups = _read_slices(target[1], devices)
    slices = len({device // devices for device in groups[0]})
    of_kind = {"all-gather": operand * slices, "reduce-scatter": operand // slices}
    return Collective(kind, instruction[1], operand, of_kind.get(kind, operand), groups, slices)


# ----------------------------------------------------------------------- replica groups

_GROUPS = re.compile(
    r"source_target_pairs=\{(?P<pairs>[\d,{}]*)\}|replica_groups=(?:"
    r"(?P<all>\{\})|"  # all devices in one group
    r"\{(?P<list>\{[\d,{}]*\})\}|"  # {{0,1},{2,3}}
    r"\[(?P<shape>[\d,]+)\]<=(?P<iota>\[[\d,]+\](?:T\([\d,]+\))?)|"  # [4,2]<=[2,2,2]T(0,2,1)
    # mesh['a'=2,'b'=4] {'b'}: groups along some axes of a mesh, which may have an order of
    # devices and sub-axes: 'b':(2)2 has size 2, inside the outermost 2 of 'b'.
    r"mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<axes>[^}]*)\}"
    r")"
)
# "{1,2}x{0:7}": each of the devices 0 to 7 with its counterparts in slices 1 and 2; or groups or
# pairs of numbers slice * 100000 + device: {{100000,200000}} and {{100000->200000}}.
_TARGET = re.compile(r'_xla_megascale_target="?([\d,:{}x>-]+)')
_SLICE = 100_000


def read_groups(line: str, devices: int) -> Groups:
    """Reads an instruction's replica groups, in any of HLO's four notations, or pairs.

    `replica_groups={}` means all devices. Raises ValueError for an unknown notation.
    """
    found = _GROUPS.search(line)
    if found is None:
        raise ValueError(f"HLO: no readable replica groups in '{line.strip()[:200]}'")
    return _groups(found[0], devices)


def _read_slices(target: str, devices: int) -> Groups:
    """Reads the devices that exchange between slices of `devices` devices."""
    if "x" in target:
        slices, places = (_ranges(part) for part in target.split("x"))
        return tuple(tuple((each - 1) * devices + place for each in slices) for place in places)
    return tuple(
        tuple((number // _SLICE - 1) * devices + number % _SLICE for number in group)
        for group in _lists(target.replace("->", ","))
    )


def _ranges(text: str) -> list[int]:
    """Reads {0:3,7} as [0, 1, 2, 3, 7]."""
    found = [_numbers(part) for part in text.split(",")]
    return [number for ends in found for number in range(ends[0], ends[-1] + 1)]


@functools.lru_cache(maxsize=1024)  # a program has few, and they may list 2048 devices
def _groups(text: str, devices: int) -> Groups:
    found = _GROUPS.fullmatch(text)
    assert found is not None
    if found["all"]:
        return (tuple(range(devices)),)
    if found["shape"]:
        return _tuples(_iota(found["iota"]).reshape(_numbers(found["shape"])))
    if found["mesh"]:
        return _tuples(_mesh_groups(found["mesh"], found["ids"], found["axes"]))
    return _lists(found["list"] or found["pairs"])


def _mesh_groups(mesh: str, ids: str | None, axes: str) -> np.ndarray:
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh)}
    shape = [*sizes.values()]
    # Device -> its position along each axis, without the parts that are axes of the groups.
    apart = dict(zip(sizes, np.indices(shape).reshape(len(shape), -1), strict=True))
    together, group = [], 1
    for name, pre, length in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", axes):
        size = int(length or sizes[name])
        inner, group = sizes[name] // (int(pre or 1) * size), group * size
        together.append(apart[name] // inner % size)
        apart[name] = apart[name] - together[-1] * inner
    order = np.lexsort([*reversed(together), *reversed(apart.values())])  # the last one counts
    if ids is not None:
        order = (_iota(ids) if ids.startswith("[") else np.array(_numbers(ids)))[order]
    return order.reshape(-1, group)


def _iota(text: str) -> np.ndarray:
    """Reads [2,4]T(1,0): 0 ... 7 in that shape, transposed by these axes and flattened."""
    shape, _, axes = text.partition("T")
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (numbers.transpose(_numbers(axes)) if axes else numbers).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _lists(text: str) -> Groups:
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", text))


def _tuples(array: np.ndarray) -> Groups:
    return tuple(map(tuple, array.tolist()))


# ------------------------------------------------------------------------------- types

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


def type_bytes(text: str) -> int:
    """Returns the bytes of a type such as "f32[2,8]{1,0:T(8,128)}" or a tuple; 4-bit is packed."""
    total = 0
    for element, sizes in _ARRAY.findall(text):
        digits = re.match(r"(?:bf|[suf]|c)(\d+)", element)
        if digits is None and element not in _BITS:
            raise ValueError(f"HLO type '{text}': unknown size of {element}")
        bits = int(digits[1]) if digits else _BITS[element]
        total += math.ceil(math.prod(_numbers(sizes)) * bits / 8)
    return total


def _elements(text: str) -> list[str]:
    """Returns the elements of a tuple's type, or any other type itself."""
    if not text.startswith("("):
        return [text]
    depth, parts = 0, [""]
    for letter in text[1:]:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            break
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
