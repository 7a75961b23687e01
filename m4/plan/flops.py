"""Floating-point operations of a step, or a search: by arithmetic from the model's sizes, and from
its program.

A product of [a, b] and [b, c] is 2abc operations; nothing but products is counted.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jax.extend import core as jex

from m4.model.ffn import part_names
from m4.model.moe import MoeLayer, group_size
from m4.model.routing import expert_capacity
from m4.model.transformer import Transformer

# Products in the backward pass: the gradients of both operands.
BACKWARD = 2


KINDS = ("attention", "attention_logits", "dense", "router", "experts", "experts_used", "dispatch")


def forward_flops(
    model: Transformer, rows: int, source_length: int, target_length: int
) -> dict[str, int]:
    """Kind -> operations of one forward pass in training over all devices.

    attention: the projections. attention_logits: queries times keys, weights times values, masked
    places included. experts: of every seat, empty ones included. experts_used: of two choices a
    token, all seated (what a count of "model FLOPs" takes). dispatch: GShard's one-hot products
    there and back (Algorithm 2, lines 3 and 8), which only the dispatch `einsum` makes.
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
        found.update(_feed_forward(model, layers, experts, tokens))
    # Attention over the encoder's output: queries and result of the target, keys and values of the
    # source.
    found["attention"] += model.decoder_layers * 2 * 2 * (source + target) * M * ND
    found["attention_logits"] += model.decoder_layers * 2 * 2 * target * source_length * ND
    found["logits"] = 2 * target * M * model.vocab_size
    return dict(found)


def search_flops(
    model: Transformer, rows: int, source_length: int, target_length: int, beams: int
) -> tuple[dict[str, int], dict[str, int]]:
    """The same of a beam search: of what is done once a batch, and of one turn of its loop.

    Once: the encoder, and the keys and values of its output for all layers of the decoder. A turn:
    one piece of every hypothesis through the decoder, over all places of the cache. A layer of
    experts that drops no token (a capacity factor of None) has for each expert a seat for every
    token.
    """
    source, pieces = rows * source_length, rows * beams
    M, ND = model.width, model.heads * model.head_width
    encoding = Counter[str](dict.fromkeys(KINDS, 0))
    projections = model.encoder_layers * 4 + model.decoder_layers * 2
    encoding["attention"] = projections * 2 * source * M * ND
    encoding["attention_logits"] = model.encoder_layers * 2 * 2 * source * source_length * ND
    turn = Counter[str](dict.fromkeys(KINDS, 0))
    turn["attention"] = model.decoder_layers * 6 * 2 * pieces * M * ND
    reach = target_length + source_length
    turn["attention_logits"] = model.decoder_layers * 2 * 2 * pieces * reach * ND
    turn["logits"] = 2 * pieces * M * model.vocab_size
    stacks = (
        (encoding, model.encoder_layers, model.encoder_experts, source, source_length),
        (turn, model.decoder_layers, model.decoder_experts, pieces, 1),
    )
    for found, layers, experts, tokens, length in stacks:
        found.update(_feed_forward(model, layers, experts, tokens, length, decode=found is turn))
    return dict(encoding), dict(turn)


def _feed_forward(
    model: Transformer,
    layers: int,
    experts: MoeLayer | None,
    tokens: int,
    row: int | None = None,
    *,
    decode: bool = False,
) -> dict[str, int]:
    """Of the feed-forward layers of a stack, with experts or without.

    row: tokens of one, outside training; decode: one position after the other.
    """
    inward = len(part_names(model.activations))
    expert_layers = 0 if experts is None else layers // model.moe_every
    found = {
        "dense": (layers - expert_layers)
        * (inward + 1)
        * tokens
        * 2
        * model.width
        * model.mlp_width
    }
    if experts is not None and expert_layers:
        assert experts.activations is not None
        assert experts.mlp_width is not None
        inward_experts, ffn = (
            len(part_names(experts.activations)),
            2 * model.width * experts.mlp_width,
        )
        factor = experts.train_capacity_factor
        if row is not None:
            factor = experts.decode_capacity_factor if decode else experts.eval_capacity_factor
        group = (
            group_size(tokens, experts.group_tokens) if row is None or factor is not None else row
        )
        E, rule = experts.num_experts, experts.capacity_rule
        C = group if factor is None else expert_capacity(group, E, factor, 2, rule)
        seats = tokens // group * E * C
        found["router"] = expert_layers * 2 * tokens * model.width * E
        found["experts"] = expert_layers * (inward_experts + 1) * seats * ffn
        found["experts_used"] = expert_layers * (inward_experts + 1) * 2 * tokens * ffn
        found["dispatch"] = expert_layers * 2 * 2 * tokens * E * C * model.width
    return found


def model_flops(forward: Mapping[str, int]) -> int:
    """Of a step, forward and backward, as a model's FLOPs are counted: tokens' own work alone, no
    empty seats, no one-hot products, nothing computed twice."""
    return (1 + BACKWARD) * own_flops(forward)


def own_flops(forward: Mapping[str, int]) -> int:
    """Of a forward pass: tokens' own work alone."""
    return sum(n for kind, n in forward.items() if kind not in ("experts", "dispatch"))


def all_flops(forward: Mapping[str, int], *, one_hot: bool) -> int:
    """Of a forward pass with all seats; one_hot: with the products of `einsum`'s dispatch too."""
    left_out = {"experts_used"} if one_hot else {"experts_used", "dispatch"}
    return sum(n for kind, n in forward.items() if kind not in left_out)


def executed_flops(model: Transformer, forward: Mapping[str, int], *, one_hot: bool) -> int:
    """Of a step, with all seats, the one-hot products of `einsum`, and what `remat` repeats.

    remat "full" runs a forward pass again of every layer, or scanned block, but for the product
    that ends it: nothing in the backward pass asks for its result. "products" repeats those that
    have a batch of matrices on both sides: attention itself, the experts, and dispatch likewise.
    """
    kinds = {kind: n for kind, n in forward.items() if kind != "experts_used"}
    if not one_hot:
        kinds["dispatch"] = 0
    again = 0
    if model.remat == "full":
        again = sum(n for kind, n in kinds.items() if kind != "logits") - kinds["dispatch"] // 2
        if not (model.scan_layers and model.moe is not None):  # there a block ends with experts
            again -= kinds["dense"] // (len(part_names(model.activations)) + 1)
    if model.remat == "products":
        again = kinds["attention_logits"] + kinds["experts"] + kinds["dispatch"] // 2
    # The mask by which tokens are sent is made of choices, which have no gradient.
    return (1 + BACKWARD) * sum(kinds.values()) - kinds["dispatch"] // 2 + again


def traced_flops(jaxpr: Any, devices: int) -> float:
    """Operations of the products in a traced program, a device, scans multiplied out.

    What is inside of a manual region (`jax.shard_map`) is one device's already; all else is divided
    evenly. Of a conditional the dearest branch counts, of a choice by platform the default: what is
    planned for is not a CPU. The body of an unbounded loop counts once.
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
            branches = parameters["branches"]
            if platforms := parameters.get("branches_platforms"):  # lax.platform_dependent
                default = [at for at, each in enumerate(platforms) if each is None]
                branches = [branches[at] for at in default] or branches
            total += max(_count(branch, share, devices) for branch in branches)
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
