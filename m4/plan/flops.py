"""Floating-point operations of a step: by arithmetic from the model's sizes, and from its program.

A product of [a, b] and [b, c] is 2abc operations; nothing but products is counted.
"""

import math
from collections.abc import Mapping
from typing import Any

from jax.extend import core as jex

from m4.model.ffn import part_names
from m4.model.moe import group_size
from m4.model.routing import expert_capacity
from m4.model.transformer import Transformer

# Products in the backward pass: the gradients of both operands.
BACKWARD = 2


def forward_flops(
    model: Transformer, rows: int, source_length: int, target_length: int
) -> dict[str, int]:
    """Kind -> operations of one forward pass in training over all devices.

    attention: the projections. attention_logits: queries times keys, weights times values, masked
    places included. experts: of every seat, empty ones included. experts_used: of two choices a
    token, all seated (what a count of "model FLOPs" takes). dispatch: GShard's one-hot products
    there and back (Algorithm 2, lines 3 and 8), which only the transport `einsum` makes.
    """
    source, target = rows * source_length, rows * target_length
    M, ND = model.width, model.heads * model.head_width
    inward = len(part_names(model.activations))
    inward_experts = len(part_names(model.expert_activations or model.activations))
    kinds = ("attention", "attention_logits", "dense", "router", "experts", "experts_used")
    found: dict[str, int] = dict.fromkeys((*kinds, "dispatch"), 0)
    for layers, tokens, length in (
        (model.encoder_layers, source, source_length),
        (model.decoder_layers, target, target_length),
    ):
        found["attention"] += layers * 4 * 2 * tokens * M * ND
        found["attention_logits"] += layers * 2 * 2 * tokens * length * ND
        expert_layers = layers // model.moe_every if model.num_experts else 0
        ffn = 2 * M * model.mlp_width
        found["dense"] += (layers - expert_layers) * (inward + 1) * tokens * ffn
        if expert_layers:
            E, S = model.num_experts, group_size(tokens, model.group_tokens)
            C = expert_capacity(S, E, model.train_capacity_factor, 2, model.capacity_rule)
            seats = tokens // S * E * C
            found["router"] += expert_layers * 2 * tokens * M * E
            found["experts"] += expert_layers * (inward_experts + 1) * seats * ffn
            found["experts_used"] += expert_layers * (inward_experts + 1) * 2 * tokens * ffn
            found["dispatch"] += expert_layers * 2 * 2 * tokens * E * C * M
    # Attention over the encoder's output: queries and result of the target, keys and values of the
    # source.
    found["attention"] += model.decoder_layers * 2 * 2 * (source + target) * M * ND
    found["attention_logits"] += model.decoder_layers * 2 * 2 * target * source_length * ND
    found["logits"] = 2 * target * M * model.vocab_size
    return found


def model_flops(forward: Mapping[str, int]) -> int:
    """Of a step, forward and backward, as a model's FLOPs are counted: tokens' own work alone, no
    empty seats, no one-hot products, nothing computed twice."""
    left_out = ("experts", "dispatch")
    return (1 + BACKWARD) * sum(n for kind, n in forward.items() if kind not in left_out)


def executed_flops(model: Transformer, forward: Mapping[str, int], *, one_hot: bool) -> int:
    """Of a step, with all seats, the one-hot products of `einsum`, and what `remat` repeats.

    remat "full" runs a forward pass again of every layer, or scanned block, but for the product
    that ends it: nothing in the backward pass asks for its result. "products" repeats no product
    with weights, which is counted as nothing.
    """
    kinds = {kind: n for kind, n in forward.items() if kind != "experts_used"}
    if not one_hot:
        kinds["dispatch"] = 0
    again = 0
    if model.remat == "full":
        again = sum(n for kind, n in kinds.items() if kind != "logits") - kinds["dispatch"] // 2
        if not (model.scan_layers and model.num_experts):  # there a block ends with experts
            again -= kinds["dense"] // (len(part_names(model.activations)) + 1)
    return (1 + BACKWARD) * sum(kinds.values()) + again


def traced_flops(jaxpr: Any, devices: int) -> float:
    """Operations of the products in a traced program, a device, scans multiplied out.

    What is inside of a manual region (`jax.shard_map`) is one device's already; all else is divided
    evenly. Of a conditional the dearest branch counts; the body of an unbounded loop counts once.
    """
    return _count(jaxpr, 1 / devices, devices)


def _count(jaxpr: Any, share: float, devices: int) -> float:
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr
    total = 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            total += share * _product(equation)
            continue
        if name == "cond":
            total += max(_count(branch, share, devices) for branch in parameters["branches"])
            continue
        times = parameters["length"] if name == "scan" else 1
        inner = share
        if name == "shard_map":
            mesh, manual = parameters["mesh"], parameters["newly_manual_axes"]
            inner = share * math.prod(mesh.shape[axis] for axis in manual)
        for value in parameters.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if isinstance(each, jex.ClosedJaxpr | jex.Jaxpr):
                    total += times * _count(each, inner, devices)
    return total


def _product(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    result = equation.outvars[0].aval.shape
    return 2 * math.prod(result) * math.prod(left[i] for i in contracted)
