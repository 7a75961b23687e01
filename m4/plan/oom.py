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


def out_of_memory(message: str, helps: list[str]) -> dict[str, Any] | None:
    """What the compiler said and what would help; None: it is another error.

    Args:
        helps: changes of the config, from `training_advice` or `decoding_advice`.

    Returns:
        message: one line. needed_bytes, available_bytes: None where the message does not tell.
        advice: helps.
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
        "advice": helps,
    }


def too_much(by_kind: Mapping[str, int], available: int, helps: list[str]) -> dict[str, Any]:
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
        "advice": helps,
    }


def training_advice(model: Transformer, given: Mapping[str, int]) -> list[str]:
    """Changes of a config by which a training step needs less memory a device.

    Args:
        given: bytes a device of weights and optimizer, by kind (`m4.plan.memory.given`).

    Returns:
        A line each; weights first, then activations.
    """
    # Weights that are whole on every device have gradients of the same size.
    found = _in_parts(2 * given["replicated weights"], "weights and gradients")
    if model.remat != "full":
        found.append(
            "compute activations again in the backward pass: transformer.Transformer.remat = 'full'"
        )
    found.append("a smaller batch: half of BATCH_SIZE halves the activations")
    if model.moe is not None:
        found.append(
            "smaller groups: half of moe.MoeLayer.group_tokens halves the masks of dispatch"
        )
    if jnp.dtype(model.dtype) != jnp.bfloat16:
        found.append(
            "activations in half the bytes: transformer.Transformer.dtype = 'bfloat16' (GShard's "
            "deep models were unstable with it)"
        )
    if not model.scan_layers:
        found.append("one block at a time: transformer.Transformer.scan_layers = True")
    return found


def decoding_advice(
    model: Transformer, given: Mapping[str, int], rows: int, beams: int
) -> list[str]:
    """The same of a beam search, which has no gradients and computes nothing again.

    Args:
        rows: of a batch over all devices.
        beams: hypotheses of a row.
    """
    found = _in_parts(given["replicated weights"], "weights")
    if model.encoder_experts and model.encoder_experts.eval_capacity_factor is None:
        found.append(
            "fewer seats of experts in the encoder: moe.MoeLayer.eval_capacity_factor, "
            "say 2.0; without one an expert has a seat for every token, and none is dropped"
        )
    if model.decoder_experts and model.decoder_experts.decode_capacity_factor is None:
        found.append("fewer seats of experts in the decoder: moe.MoeLayer.decode_capacity_factor")
    found += [
        f"fewer rows at a time: jobs.Decoding.batch_rows; {rows} over all devices here, and at "
        "least one for each device that rows lie over",
        "shorter sources: jobs.Decoding.max_source_length; longer ones are cut",
    ]
    if beams > 1:
        found.append(
            f"fewer hypotheses: jobs.Decoding.beams, {beams} here; each has keys and values of its "
            "own"
        )
    if jnp.dtype(model.dtype) != jnp.bfloat16:
        found.append(
            "activations, keys and values in half the bytes: transformer.Transformer.dtype = "
            "'bfloat16'"
        )
    return found


def _in_parts(less: int, what: str) -> list[str]:
    """Advice to lay the weights in parts, where it would save something. less: bytes a device."""
    if less <= GIB / 4:
        return []
    return [
        "weights in parts (ZeRO): loop.train.zero = ('expert',), or without experts "
        "mesh.make_mesh.fsdp, a number that divides the widths: up to "
        f"{less / GIB:.1f} GiB a device less, {what}"
    ]
