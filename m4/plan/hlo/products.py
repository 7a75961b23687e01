"""Floating-point operations of the products in a computation of an HLO text.

A contraction over n is 2n operations for each number of the result. XLA's own count
(`cost_analysis()`) has a loop's body once; `m4.plan.hlo.collectives.measure` multiplies loops out.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Sequence

from m4.plan.hlo.types import INSTRUCTION, dimensions

# Substrings of lines that can be products.
MARKS = (" dot(", " convolution(", " custom-call(", "-dot(")
# Custom calls without matrix products; the inside of any other is unknown.
_NO_PRODUCTS = {
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
    "PrepareAsyncCallDone",
    "PrepareAsyncCallStart",
    "Sharding",
    "SliceId",
    "TopK",
    "X64Combine",
    "X64SplitHigh",
    "X64SplitLow",
    "ZeroCrop",
}
_TYPE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\S+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# In a GEMM's settings, as JSON.
_GEMM_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([\d",]*)\]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


def product_flops(products: Sequence[str], lines: Sequence[str]) -> tuple[int, Counter[str]]:
    """Operations of one run of a computation, without its callees.

    Args:
        products: its lines with one of `MARKS`. lines: all of them, with the operands' types.

    Returns:
        The operations; and how many instructions are not counted and may be products, by opcode
        or, for custom calls, target.
    """
    types = {found[1]: found[2] for line in lines if (found := _TYPE.match(line))}
    total, unread = 0, Counter[str]()
    for line in products:
        found = INSTRUCTION.match(line)
        if found is None or not (found[3] in _COUNTS or found[3].endswith(("-dot", "custom-call"))):
            continue
        target = _TARGET.search(line) if found[3] == "custom-call" else None
        kind = target[1] if target else found[3]
        if kind in _NO_PRODUCTS or kind.startswith("__cub$"):  # sorts
            continue
        # Each operand may have its type before it.
        names = re.findall(r"%([\w.\-]+)", found[4]) or re.findall(r"[\w.\-]+", found[4])
        operands = [dimensions(types[name]) for name in names[:2] if name in types]
        reader = _gemm if kind.startswith("__cublas$") else _COUNTS.get(kind)
        count = reader(line, dimensions(found[2]), *operands) if reader and operands[1:] else None
        total += count or 0
        unread[kind] += count is None
    return total, +unread


def _dot(line: str, result: list[int], left: list[int], _right: list[int]) -> int | None:
    return _contraction(_CONTRACTED.search(line), result, left)


def _gemm(line: str, result: list[int], left: list[int], _right: list[int]) -> int | None:
    return _contraction(_GEMM_CONTRACTED.search(line), result, left)


def _contraction(axes: re.Match[str] | None, result: list[int], left: list[int]) -> int | None:
    if axes is None:
        return None
    return 2 * math.prod(result) * math.prod(left[int(i)] for i in re.findall(r"\d+", axes[1]))


def _convolution(line: str, result: list[int], left: list[int], right: list[int]) -> int | None:
    """Padding, and gaps of a dilated operand, are not counted: TPUs write batched products as
    windows of the batch's size, of which one element is not padding.
    """
    labels = _LABELS.search(line)
    if labels is None:
        return None
    window = _WINDOW.search(line)
    settings = dict(re.findall(r"(\w+)=(\S+)", window[1] if window else ""))
    spatial = sorted(letter for letter in labels[1] if letter.isdigit())
    meet = 1
    for axis, letter in enumerate(spatial):

        def each(name: str, default: str, axis: int = axis) -> str:
            return settings[name].split("x")[axis] if name in settings else default

        meet *= _meetings(
            left[labels[1].index(letter)],
            right[labels[2].index(letter)],
            result[labels[3].index(letter)],
            int(each("stride", "1")),
            int(each("pad", "0_0").split("_")[0]),
            int(each("lhs_dilate", "1")),
            int(each("rhs_dilate", "1")),
        )
    # The kernel's input features are already those of one group, the result's rows of one batch
    # group.
    rows, features = result[labels[3].index("b")], result[labels[3].index("f")]
    return 2 * rows * features * right[labels[2].index("i")] * meet


@functools.cache
def _meetings(
    left: int, kernel: int, result: int, stride: int, pad: int, left_step: int, kernel_step: int
) -> int:
    """Along one axis, how often an element of the window meets one of the operand.

    Position o of the result has element k of the kernel at position o * stride + k * kernel_step -
    pad of the operand, whose element i is at i * left_step.
    """
    found = 0
    for o in range(result):
        start = o * stride - pad
        if kernel_step == 1:
            first, last = -(-start // left_step), (start + kernel - 1) // left_step
            found += max(0, min(last, left - 1) - max(first, 0) + 1)
            continue
        for k in range(kernel):
            i, rest = divmod(start + k * kernel_step, left_step)
            found += rest == 0 and 0 <= i < left
    return found


_COUNTS = {"dot": _dot, "convolution": _convolution}
