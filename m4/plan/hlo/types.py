"""Instructions and types in an HLO text.

A type is "f32[2,8]{1,0:T(8,128)}", or a tuple of such.
"""

import math
import re

# "  ROOT %name = type opcode(operands": four groups, operands up to the first closing parenthesis.
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(([^)]*)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


def type_bytes(text: str) -> int:
    """Bytes of an HLO type, "f32[2,8]{1,0:T(8,128)}" or a tuple; types of 4 bits are packed.

    Raises:
        ValueError: an element type without a size in its name.
    """
    total = 0
    for element, sizes in _ARRAY.findall(text):
        bits = _BITS.get(element)
        if bits is None:
            digits = re.match(r"(?:bf|[suf]|c)(\d+)", element)
            if digits is None:
                raise ValueError(f"HLO type '{text}': unknown size of {element}")
            bits = int(digits[1])
        total += math.ceil(math.prod(_sizes(sizes)) * bits / 8)
    return total


def dimensions(text: str) -> list[int]:
    """Sizes of an array's type, [2, 8]; of a tuple, of its first array."""
    found = _ARRAY.search(text)
    return _sizes(found[2]) if found else []


def elements(text: str) -> list[str]:
    """The elements of a tuple's type; of any other type, itself."""
    if not text.startswith("("):
        return [text]
    depth, start, parts = 0, 1, []
    for place, letter in enumerate(text):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
        if depth == 0:
            break
    return parts


def _sizes(text: str) -> list[int]:
    return [int(n.lstrip("<=")) for n in text.split(",") if n]
