"""Floating-point operations of a training step or a beam search.

They are counted by arithmetic from the model's sizes, or in a traced program. A product of [a, b]
and [b, c] has 2abc operations; only products count.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jax.extend import core as jex

from m4.model.dispatch.dropless import FEWEST_OVER_DEVICES, dropless, most_blocks, rows_of_block
from m4.model.feed_forward import part_names
from m4.model.moe import MoeLayer, group_size
from m4.model.routing import expert_capacity
from m4.model.transformer import Transformer

# Products of forward and backward pass; the latter has the gradients of both operands.
BACKWARD = 2
KINDS = (
    *("attention", "attention_logits", "dense", "router", "shared", "experts", "experts_used"),
    "dispatch",
)


def forward_flops(
    model: Transformer,
    rows: int,
    source_length: int,
    target_length: int,
    *,
    experts_apart: bool = False,
) -> dict[str, int]:
    """Returns kind -> operations of one forward pass in training over all devices.

    "attention" has the projections; "attention_logits" has queries times keys and weights times
    values, with masked positions. "experts" counts all slots, also empty ones, or, if nothing is
    dropped, as many rows as the dispatch `dropless` may need. "experts_used" counts two choices per
    token (for "model FLOPs"). "dispatch" has GShard's one-hot products of dispatch and combine
    (Algorithm 2, lines 3 and 8), which only the dispatch `einsum` computes.
    """
    source, target = rows * source_length, rows * target_length
    M, ND = model.width, model.heads * model.head_width
    found = Counter[str](dict.fromkeys(KINDS, 0))
    for layers, experts, tokens, length in (
        (model.encoder_layers, model.encoder_experts, source, source_length),
        (model.decoder_layers, model.decoder_experts, target, target_length),
    ):
        found["attention"] += layers * 4 * 2 * tokens * M * ND
        found["attention_logits"] += layers * 2 * 2 * tokens * length * ND
        found.update(_feed_forward(model, experts, layers, tokens, "train", apart=experts_apart))
    # Attention over the encoder's output: queries and result of the target, keys and values of the
    # source.
    found["attention"] += model.decoder_layers * 2 * 2 * (source + target) * M * ND
    found["attention_logits"] += model.decoder_layers * 2 * 2 * target * source_length * ND
    found["logits"] = 2 * target * M * model.vocab_size
    return dict(found)


def search_flops(
    model: Transformer,
    rows: int,
    source_length: int,
    target_length: int,
    beams: int,
    *,
    experts_apart: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the operations of encoding a batch, and of a decoding step, by kind.

    Encoding is the encoder and the keys and values of its output for all decoder layers. A step
    takes one piece of each hypothesis through the decoder, over all positions of the cache.
    """
    source, pieces = rows * source_length, rows * beams
    M, ND = model.width, model.heads * model.head_width
    encoding = Counter[str](dict.fromkeys(KINDS, 0))
    projections = model.encoder_layers * 4 + model.decoder_layers * 2
    encoding["attention"] = projections * 2 * source * M * ND
    encoding["attention_logits"] = model.encoder_layers * 2 * 2 * source * source_length * ND
    step = Counter[str](dict.fromkeys(KINDS, 0))
    step["attention"] = model.decoder_layers * 6 * 2 * pieces * M * ND
    reach = target_length + source_length
    step["attention_logits"] = model.decoder_layers * 2 * 2 * pieces * reach * ND
    step["logits"] = 2 * pieces * M * model.vocab_size
    of = functools.partial(_feed_forward, model, apart=experts_apart)
    encoder, decoder = model.encoder_layers, model.decoder_layers
    encoding.update(of(model.encoder_experts, encoder, source, "eval", row=source_length))
    step.update(of(model.decoder_experts, decoder, pieces, "decode", row=1))
    return dict(encoding), dict(step)


def _feed_forward(
    model: Transformer,
    experts: MoeLayer | None,
    layers: int,
    tokens: int,
    mode: str,
    row: int = 0,
    *,
    apart: bool,
) -> dict[str, int]:
    """Returns the operations of a stack's feed-forward layers, with or without experts."""
    M = model.width
    expert_layers = layers // model.moe_every if experts else 0
    products = len(part_names(model.activations)) + 1
    found = {"dense": (layers - expert_layers) * products * tokens * 2 * M * model.mlp_width}
    if experts is None or not expert_layers:
        return found
    assert experts.activations is not None
    assert experts.mlp_width is not None
    E, products = experts.num_experts, len(part_names(experts.activations)) + 1
    factor = getattr(experts, f"{mode}_capacity_factor")
    group = row if factor is None and row else group_size(tokens, experts.group_tokens)
    C = group if factor is None else expert_capacity(group, E, factor, 2, experts.capacity_rule)
    slots = tokens // group * E * C
    if factor is None and experts.dropless_dispatch is dropless:
        rows = rows_of_block(2 * tokens, E, *([FEWEST_OVER_DEVICES] if apart else []))
        slots = rows * most_blocks(2 * tokens, E, rows)
    ffn = 2 * M * experts.mlp_width
    return {
        **found,
        "router": expert_layers * 2 * tokens * M * E,
        "shared": expert_layers * products * tokens * 2 * M * experts.shared_width,
        "experts": expert_layers * products * slots * ffn,
        "experts_used": expert_layers * products * 2 * tokens * ffn,
        "dispatch": expert_layers * 2 * 2 * tokens * E * C * M,
    }


def model_flops(forward: Mapping[str, int]) -> int:
    """Returns the model FLOPs of a training step, forward and backward, without recomputation."""
    return (1 + BACKWARD) * forward_model_flops(forward)


def forward_model_flops(forward: Mapping[str, int]) -> int:
    """Returns the model FLOPs of a forward pass, without empty slots and one-hot products."""
    return sum(n for kind, n in forward.items() if kind not in ("experts", "dispatch"))


def forward_executed_flops(forward: Mapping[str, int], *, one_hot: bool) -> int:
    """Returns the FLOPs of a forward pass with all slots, and the one-hot products if `one_hot`."""
    left_out = {"experts_used"} if one_hot else {"experts_used", "dispatch"}
    return sum(n for kind, n in forward.items() if kind not in left_out)


def executed_flops(
    model: Transformer, forward: Mapping[str, int], *, one_hot: bool, experts_apart: bool = False
) -> int:
    """Returns the FLOPs of a step with all slots, one-hot products and rematerialization.

    remat "full" repeats the forward pass of each layer or scanned block, except the last product,
    whose result the backward pass does not need. "products" repeats products with a batch of
    matrices on both sides: attention logits and sums, experts, and the dispatch of tokens.
    """
    kinds = {kind: n for kind, n in forward.items() if kind != "experts_used"}
    if not one_hot:
        kinds["dispatch"] = 0
    again, layer = 0, model.encoder_experts
    parts = len(part_names(layer.activations or ())) if layer else 0
    if model.remat == "full":
        again = sum(n for kind, n in kinds.items() if kind != "logits") - kinds["dispatch"] // 2
        again -= kinds["shared"] // (parts + 1)
        if not (model.scan_layers and model.moe is not None):  # such a block ends with experts
            again -= kinds["dense"] // (len(part_names(model.activations)) + 1)
    if model.remat == "products":
        again = kinds["attention_logits"] + kinds["experts"] + kinds["dispatch"] // 2
    experts = layer if experts_apart else None
    if experts and experts.train_capacity_factor is None and experts.dropless_dispatch is dropless:
        # In the backward pass, rows travel again and all but the experts' last product is repeated.
        again += kinds["experts"] * parts // (parts + 1)
    # The dispatch mask has no gradient, as it is made of discrete choices.
    return (1 + BACKWARD) * sum(kinds.values()) - kinds["dispatch"] // 2 + again


def traced_flops(jaxpr: Any, devices: float) -> float:
    """Counts the operations per device of a traced program's products, with scans multiplied out.

    A manual region (`jax.shard_map`) is one device's already; everything else is divided evenly. A
    conditional counts as its most expensive branch, a choice by platform as its default (plans are
    not for CPUs), and the body of an unbounded loop once.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr
    share, total = 1 / devices, 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += share * 2 * math.prod(result) * math.prod(left[i] for i in contracted)
            continue
        if name == "ragged_dot_general":  # [P, M] rows, each with its own of E matrices [M, F]
            rows, matrices = (operand.aval.shape for operand in equation.invars[:2])
            total += share * 2 * rows[0] * math.prod(matrices[1:])
            continue
        if name == "pallas_call":  # by its own estimate, for the maximum of rows
            estimate = parameters["cost_estimate"]
            total += share * estimate.flops if estimate else 0.0
            continue
        if name == "cond":
            branches = parameters["branches"]
            if platforms := parameters.get("branches_platforms"):  # lax.platform_dependent
                default = [at for at, each in enumerate(platforms) if each is None]
                branches = [branches[at] for at in default] or branches
            total += max(traced_flops(branch, devices) for branch in branches)
            continue
        times = parameters["length"] if name == "scan" else 1
        inside = devices
        if name == "shard_map":
            mesh, manual = parameters["mesh"], parameters["newly_manual_axes"]
            inside = devices / math.prod(mesh.shape[axis] for axis in manual)
        for value in parameters.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if isinstance(each, jex.ClosedJaxpr | jex.Jaxpr):
                    total += times * traced_flops(each, inside)
    return total
