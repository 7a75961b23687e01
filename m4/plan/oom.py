"""A program that does not fit: the compiler's message in one line, and which change would help."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from m4.model.transformer import Transformer
from m4.plan.machines import GIB

# "... required for HLO temporaries (20.31G) exceeds available HBM (15.48G)";
# "Used 24.00G of 15.48G hbm".
_NEEDED = (
    re.compile(r"required for HLO (\w+) \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)"),
    re.compile(r"(Used) ([\d.]+)([KMGT]) of ([\d.]+)[KMGT] hbm"),
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def out_of_memory(
    message: str, model: Transformer, given: Mapping[str, int]
) -> dict[str, Any] | None:
    """What the compiler said and what would help; None: it is another error.

    Args:
        given: bytes a device of weights and optimizer, by kind (`m4.plan.memory.given`).

    Returns:
        message: one line. needed_bytes, available_bytes: None where the message does not tell.
        advice: changes of the config, those of known size first.
    """
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    first = next(line.strip() for line in message.splitlines() if line.strip())
    first = first.removeprefix("RESOURCE_EXHAUSTED: ").split(" Please ")[0]
    needed = available = None
    for pattern in _NEEDED:
        if found := pattern.search(message):
            needed = int(float(found[2]) * _UNITS[found[3]])
            available = int(float(found[4]) * GIB)
            break
    return {
        "message": first,
        "needed_bytes": needed,
        "available_bytes": available,
        "advice": advice(model, given),
    }


def too_much(
    by_kind: Mapping[str, int], available: int, model: Transformer, given: Mapping[str, int]
) -> dict[str, Any]:
    """The same, of a compiled program whose bytes by kind are more than a device has."""
    needed = sum(by_kind.values())
    most = max(by_kind, key=lambda kind: by_kind[kind])
    return {
        "message": (
            f"{needed / GIB:.2f} GiB, most of them {most} ({by_kind[most] / GIB:.2f}), exceed the "
            f"memory ({available / GIB:.2f} GiB)"
        ),
        "needed_bytes": needed,
        "available_bytes": available,
        "advice": advice(model, given),
    }


def advice(model: Transformer, given: Mapping[str, int]) -> list[str]:
    """Changes of a config that need less memory a device; weights first, then activations."""
    found = []
    whole = given["replicated weights"]
    # Weights that are whole on every device have gradients of the same size.
    if whole > GIB / 8:
        found.append(
            "weights in parts (ZeRO): loop.train.zero = ('expert',), or without experts "
            "mesh.make_mesh.fsdp, a number that divides the widths: up to "
            f"{2 * whole / GIB:.1f} GiB a device less, weights and gradients"
        )
    if model.remat != "full":
        found.append(
            "compute activations again in the backward pass: transformer.Transformer.remat = 'full'"
        )
    found.append("a smaller batch: half of BATCH_SIZE halves the activations")
    if model.num_experts:
        found.append(
            "smaller groups: half of transformer.Transformer.group_tokens halves the masks of "
            "dispatch"
        )
    if jnp.dtype(model.dtype) != jnp.bfloat16:
        found.append(
            "activations in half the bytes: transformer.Transformer.dtype = 'bfloat16' (GShard's "
            "deep models were unstable with it)"
        )
    if not model.scan_layers:
        found.append("one block at a time: transformer.Transformer.scan_layers = True")
    return found
