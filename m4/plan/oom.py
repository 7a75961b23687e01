"""A program that does not fit: the compiler's message in one line, and changes that would help."""

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
    """The compiler's message and advice; None: another error.

    Args:
        helps: changes of the config, from `training_advice` or `decoding_advice`.

    Returns:
        message: one line. needed_bytes, available_bytes: None where the message has none.
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
    """The same for a compiled program whose bytes by kind exceed a device's."""
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
    """Changes of a config that reduce a training step's memory a device.

    Args:
        given: bytes a device of weights and optimizer, by kind (`m4.plan.memory.given`).

    Returns:
        A line each; weights first, then activations.
    """
    # Replicated weights have gradients of the same size.
    found = _sharding_advice(2 * given["replicated weights"], "weights and gradients")
    if model.remat != "full":
        found.append(
            "recompute activations in the backward pass: transformer.Transformer.remat = 'full'"
        )
    found.append("a smaller batch: half of BATCH_SIZE halves the activations")
    if model.moe is not None:
        found.append(
            "smaller groups: half of moe.MoeLayer.group_tokens halves the masks of dispatch"
        )
    if jnp.dtype(model.dtype) != jnp.bfloat16:
        found.append(
            "activations of half the size: transformer.Transformer.dtype = 'bfloat16' (GShard's "
            "deep models were unstable with it)"
        )
    if not model.scan_layers:
        found.append("one block at a time: transformer.Transformer.scan_layers = True")
    return found


def decoding_advice(
    model: Transformer, given: Mapping[str, int], rows: int, beams: int
) -> list[str]:
    """The same for a beam search, which has no gradients and no rematerialization.

    Args:
        rows: of a batch over all devices.
        beams: hypotheses of a row.
    """
    found = _sharding_advice(given["replicated weights"], "weights")
    if model.encoder_experts and model.encoder_experts.eval_capacity_factor is None:
        found.append(
            "fewer slots of the encoder's experts: moe.MoeLayer.eval_capacity_factor = 2.0; with "
            "None each expert has a slot for every token, and none is dropped"
        )
    if model.decoder_experts and model.decoder_experts.decode_capacity_factor is None:
        found.append("fewer slots of the decoder's experts: moe.MoeLayer.decode_capacity_factor")
    found += [
        f"fewer rows a batch: experiment.Decoding.batch_rows, {rows} over all devices here; at "
        "least one on each device that has different rows",
        "shorter sources: experiment.Decoding.max_source_length; longer ones are cut",
    ]
    if beams > 1:
        found.append(
            f"fewer hypotheses: experiment.Decoding.beams, {beams} here; each has its own keys and "
            "values"
        )
    if jnp.dtype(model.dtype) != jnp.bfloat16:
        found.append(
            "activations, keys and values of half the size: transformer.Transformer.dtype = "
            "'bfloat16'"
        )
    return found


def _sharding_advice(less: int, what: str) -> list[str]:
    """Advice to shard the weights, where it saves enough. less: bytes a device."""
    if less <= GIB / 4:
        return []
    return [
        "sharded weights (ZeRO): experiment.Training.fsdp_axes = ('expert',), or without experts "
        "mesh.make_mesh.fsdp, a number that divides the widths: up to "
        f"{less / GIB:.1f} GiB a device less, {what}"
    ]
