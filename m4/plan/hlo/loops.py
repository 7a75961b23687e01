"""Trip counts of the loops in an HLO text.

XLA writes the number at the loop on CPU and GPU; on TPU it follows from the counter's start, step
and limit.
"""

import re
from dataclasses import dataclass, field

from m4.model.dispatch.row_exchange import ROUNDS
from m4.plan.hlo.types import INSTRUCTION

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ROUNDS = re.compile(rf'{ROUNDS}\)*/while"')
_OPCODES = ("constant", "copy", "add", "get-tuple-element", "compare", "tuple")


@dataclass
class Scalars:
    """The scalars and tuples of a computation, its loops' counters among them.

    Attributes:
        known: name -> (opcode, what is in its parentheses, line). root: the name of the result.
    """

    known: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    root: str = ""

    def read(self, line: str) -> None:
        """Takes in a line of the computation."""
        found = INSTRUCTION.match(line)
        if found and found[3] in _OPCODES:
            self.known[found[1]] = (found[3], found[4], line)
            if line.lstrip().startswith("ROOT "):
                self.root = found[1]


def trip_count(
    line: str, operand: str, caller: Scalars, condition: Scalars, body: Scalars
) -> int | None:
    """How often the body runs: by XLA's note, or of (i = start; i < limit; i += step); or None.
    The rounds in which rows travel to their experts are one, as for a balanced routing.

    Args:
        line: the loop's. operand: what it starts with.
        caller, condition, body: of the computations with the loop, of its test and of its body.
    """
    if noted := _TRIPS.search(line):
        return int(noted[1])
    if _ROUNDS.search(line):
        return 1
    opcode, compared, text = condition.known.get(condition.root, ("", "", ""))
    if opcode != "compare" or "direction=LT" not in text:
        return None
    counter, limit = _operands(compared)
    index = _element(condition, counter)
    first = caller.known.get(_operands(operand)[-1], ("", "", ""))
    last = body.known.get(body.root, ("", "", ""))
    if index is None or first[0] != "tuple" or last[0] != "tuple":
        return None
    start, end = _constant(caller, _operands(first[1])[index]), _constant(condition, limit)
    opcode, added, _ = body.known.get(_operands(last[1])[index], ("", "", ""))
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


def _constant(computation: Scalars, name: str) -> int | None:
    opcode, inside, _ = computation.known.get(name, ("", "", ""))
    if opcode == "copy":
        return _constant(computation, _operands(inside)[-1])
    return int(inside) if opcode == "constant" and re.fullmatch(r"-?\d+", inside) else None


def _element(computation: Scalars, name: str) -> int | None:
    """Which element of the computation's parameter it is."""
    opcode, inside, line = computation.known.get(name, ("", "", ""))
    if opcode == "copy":
        return _element(computation, _operands(inside)[-1])
    found = re.search(r"\bindex=(\d+)", line)
    return int(found[1]) if opcode == "get-tuple-element" and found else None
