"""Compiles a small model's gradient for any machine, and finds the products in the text.

As a command, `python -m tests.model.compiled_step MACHINE`: the optimized program for a machine
that need not be there, such as v5e:2x2 or h100:1x1.
"""

import re
import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from m4.model.moe import MoeLayer, mean_metrics
from m4.model.transformer import Transformer
from m4.train.step import cross_entropy

# Where products belong to, by the names in an instruction's metadata: the output projection, tied
# or not, and the router.
LOGITS = r"token_embedder\.attend/|/logits_dense/"
ROUTER = r"\._score/"
KINDS: dict[str, dict[str, Any]] = {
    "float32": {}, "float32 untied": {"tied_logits": False}, "bfloat16": {"dtype": jnp.bfloat16},
    "bfloat16 untied": {"tied_logits": False, "dtype": jnp.bfloat16},
}  # fmt: skip
COMPILED = ["float32", "bfloat16"]  # dtypes for which the command compiles


class Product(NamedTuple):
    """A matrix product in a compiled program.

    Attributes:
        place: Its place in the model.
        dtype: Type of its result.
        full: It asks for full precision.
    """

    place: str
    dtype: str
    full: bool


def products(text: str) -> list[Product]:
    """Returns the matrix products of an HLO text of any platform."""
    lines = [
        line
        for line in text.splitlines()
        if re.search(r" (dot|convolution)\(|__cublas\$", line) and "op_name=" in line
    ]
    return [
        Product(
            place=re.findall(r'op_name="([^"]*)"', line)[0],
            dtype=re.findall(r" = \(?(\w+)\[", line)[0],
            full=re.search(r'precision[="{:\[]+highest"?,"?highest', line, re.IGNORECASE)
            is not None,
        )
        for line in lines
    ]


def gradient(kind: str, device: Any = None):
    """Returns (function, shapes of its arguments) with one MoE layer a stack and unequal sizes."""
    model = Transformer(
        vocab_size=101, width=24, heads=2, head_width=16, mlp_width=40, encoder_layers=2,
        decoder_layers=2, moe=partial(MoeLayer, num_experts=7, group_tokens=32), **KINDS[kind],
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, x, x)["params"], tokens)

    def loss(params, tokens):
        logits, sown = model.apply(
            {"params": params}, *(tokens, tokens, tokens), enable_dropout=True,
            rngs={"dropout": jax.random.key(1)}, mutable=["intermediates"],
        )  # fmt: skip
        assert isinstance(logits, jax.Array)
        metrics = mean_metrics(sown["intermediates"])
        losses = cross_entropy(logits, tokens, 0.1, 1e-4).training_BT
        return jnp.mean(losses) + metrics["auxiliary_loss"] + metrics["router_z_loss"]

    arguments = (params, tokens)
    if device is not None:
        place = SingleDeviceSharding(device)
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
        )
    return jax.grad(loss), arguments


if __name__ == "__main__":
    from m4.parallel.platform.machines import topology
    from m4.plan.compile import devices_of

    machine = topology(sys.argv[1])
    for kind in COMPILED:
        function, arguments = gradient(kind, devices_of(machine)[0])
        traced = jax.jit(function).trace(*arguments)
        lowered = traced.lower(lowering_platforms=(machine.chip.platform,))
        print(f"KIND {kind}\n{lowered.compile().as_text()}")
