"""Each strategy of gin_configs/strategies shards the arrays that docs/parallelism.md says.

Shardings are read from shapes and from the traced step; nothing is compiled.
tests/test_strategies.py compares results, and the collectives of the compiled step.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

from m4.data.stream.batches import DECODER_KEYS, ENCODER_KEYS
from m4.model.transformer import Transformer, abstract_variables
from m4.plan.program import planned
from m4.train.program import TrainProgram, initialize
from tests.test_strategies import FIRST, documented, experiment_named, names

LANGUAGES = 11
ROWS, LENGTH = 24, 64  # in all configs

# How many weights there are, by hand. The demo's width: M = N * D = 128, N = 8, F = 512, 2 + 2
# layers; V = 3072, which is 3000 rounded up to a multiple of 128.
EMBEDDING = 3072 * 128
ATTENTION = 6 * 4 * 128 * 128  # 2 of the encoder, 2 + 2 of the decoder; query, key, value, out
FEED_FORWARD = 2 * 128 * 512  # parameters of a layer or an expert
BIASES = 2 * 8 * 32  # heads x buckets of relative positions, of each stack
NORMS = 12 * 128  # 2 a layer of the encoder, 3 of the decoder, and 1 at the end of each
# Every second layer, 2 of 4, has experts in the place of its feed-forward.
DENSE = EMBEDDING + ATTENTION + 2 * FEED_FORWARD
EXPERTS = {E: 2 * E * FEED_FORWARD for E in (4, 8, 16)}
ROUTERS = {E: 2 * 128 * E for E in (4, 8, 16)}
ALL = DENSE + EXPERTS[8] + BIASES + ROUTERS[8] + NORMS
# The dense model has 4 feed-forward layers and no experts.
LAYERS = ATTENTION + 4 * FEED_FORWARD

# The end of a parameter's path -> its name below; letters as in parallel/axes.py, H for N * D, K
# for buckets.
KINDS = {
    r"token_embedder/embedding": "embedding VM", r"(query|key|value)/kernel": "attention MH",
    r"attention/out/kernel": "attention HM", r"mlp/wi/kernel": "mlp MF", r"mlp/wo/kernel": "mlp FM",
    r"experts/wi/kernel": "experts EMF", r"experts/wo/kernel": "experts EFM",
    r"router/kernel": "router ME", r"rel_embedding": "bias NK", r"scale": "norm M",
}  # fmt: skip


class Parts(NamedTuple):
    """Shardings over the 8 devices, with an entry for each dimension and "." for a whole one.

    Attributes:
        numbers: Number of weights on each device, by hand.
        weights: Shardings of the weights in `KINDS` that are not whole.
        arrays: Shardings that the step requests for activations of a shape.
    """

    numbers: float
    weights: Mapping[str, str]
    arrays: Mapping[str, set[str]]


def rows_over(axes: str) -> dict[str, set[str]]:
    """Shards activations, logits and the experts' inputs by rows; a group, G, is a row here."""
    return {
        "BLM": {f"{axes} . ."}, "BLF": {f"{axes} . ."}, "BLV": {f"{axes} . ."},
        "GSE": {f"{axes} . ."}, "EGCM": {f". {axes} . ."},
    }  # fmt: skip


def experts_over(rows: str, experts: str, groups: str) -> dict[str, set[str]]:
    """Shards plans by group, and tokens by group, then by expert, as in the paper's Algorithm 2.

    That change, and the one back, are the all-to-all exchanges.
    """
    return {"GSEC": {f"{rows} . . ."}, "EGCM": {f". {rows} . .", f"{experts} {groups} . ."}}


# Megatron: a product that makes heads or inner widths is cut along its output, the next one along
# its input. Heads together, BLH, have the shape of BLM, which is whole between layers.
MEGATRON = {
    "embedding VM": "model .", "attention MH": ". model", "attention HM": "model .",
    "mlp MF": ". model", "mlp FM": "model .", "experts EMF": ". . model",
    "experts EFM": ". model .", "bias NK": "model .",
}  # fmt: skip


def megatron_over(rows: str) -> dict[str, set[str]]:
    return rows_over(rows) | {
        "BLM": {f"{rows} . .", f"{rows} . model"},
        "BLF": {f"{rows} . model"},
        "BLV": {f"{rows} . model"},
    }


EXPERT = {"experts EMF": "expert . .", "experts EFM": "expert . ."}
STRATEGIES = {
    "data_parallel": Parts(ALL, {}, rows_over("data")),
    # The largest dimension, the first of two that are equal; every weight divides by 8.
    "zero": Parts(
        ALL / 8,
        {
            "embedding VM": "data .", "attention MH": "data .", "attention HM": "data .",
            "mlp MF": ". data", "mlp FM": "data .", "experts EMF": ". . data",
            "experts EFM": ". data .", "router ME": "data .", "bias NK": ". data",
            "norm M": "data",
        },
        rows_over("data"),
    ),
    # What is computed whole by each is whole: routers and norms. No rows are sharded.
    "tensor_parallel": Parts(
        (ALL - ROUTERS[8] - NORMS) / 8 + ROUTERS[8] + NORMS, MEGATRON, megatron_over(".")
    ),
    # Megatron's shards, halved over fsdp, as are routers and norms.
    "hybrid": Parts(
        (ALL - ROUTERS[8] - NORMS) / 4 + (ROUTERS[8] + NORMS) / 2,
        {
            "embedding VM": "model+fsdp .",
            "attention MH": "fsdp model",
            "attention HM": "model+fsdp .",
            "mlp MF": ". model+fsdp",
            "mlp FM": "model+fsdp .",
            "experts EMF": ". . model+fsdp",
            "experts EFM": ". model+fsdp .",
            "router ME": "fsdp .",
            "bias NK": "model fsdp",
            "norm M": "fsdp",
        },
        megatron_over("data+fsdp"),
    ),
    # 4 x 2; a norm has the width alone, a bias the heads.
    "two_dimensional": Parts(
        (EMBEDDING + LAYERS) / 8 + NORMS / 4 + BIASES / 2,
        {
            "embedding VM": "model data",
            "attention MH": "data model",
            "attention HM": "model data",
            "mlp MF": "data model",
            "mlp FM": "model data",
            "bias NK": "model .",
            "norm M": "data",
        },
        {"BLM": {"data . model"}, "BLF": {"data . model"}, "BLV": {"data . model"}},
    ),
    "expert_parallel": Parts(
        ALL - EXPERTS[8] * 7 / 8,
        EXPERT,
        rows_over("expert") | experts_over("expert", "expert", "."),
    ),
    "expert_parallel_more": Parts(  # two experts a device
        ALL - EXPERTS[8] - ROUTERS[8] + EXPERTS[16] / 8 + ROUTERS[16],
        EXPERT,
        rows_over("expert") | experts_over("expert", "expert", "."),
    ),
    "expert_parallel_fewer": Parts(  # each expert on two devices, half of the groups at each
        ALL - EXPERTS[8] - ROUTERS[8] + EXPERTS[4] / 4 + ROUTERS[4],
        EXPERT,
        rows_over("data+expert") | experts_over("data+expert", "expert", "data"),
    ),
    "expert_data_model": Parts(
        (DENSE + BIASES) / 2 + EXPERTS[8] / 4 + ROUTERS[8] + NORMS,
        MEGATRON | {"experts EMF": "expert . model", "experts EFM": "expert model ."},
        megatron_over("data+expert") | experts_over("data+expert", "expert", "data"),
    ),
    # A stage has half of the layers, which are stacked. The rows of embeddings and logits lie over
    # both axes; within the stages an array is one device's own.
    "pipeline": Parts(
        EMBEDDING + (LAYERS + NORMS - 2 * 128) / 2 + BIASES + 2 * 128,
        {},
        {"BLM": {"data+stage . ."}, "BLV": {"data+stage . ."}},
    ),
    "accumulation": Parts(ALL, {}, rows_over("data")),
    "rematerialisation": Parts(ALL, {}, rows_over("data")),
    # Megatron's; between its products a device has a quarter of each row.
    "sequence": Parts(
        (ALL - ROUTERS[8] - NORMS) / 4 + ROUTERS[8] + NORMS,
        MEGATRON,
        megatron_over("data") | {"BLM": {"data model .", "data . model"}},
    ),
}  # fmt: skip


def spread(mesh: Any, spec: PartitionSpec, dimensions: int) -> str:
    """Writes a sharding as `Parts` does; axes of one part are left out."""
    entries = [*spec, *[None] * (dimensions - len(spec))]
    named = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    split = ["+".join(sorted(a for a in entry if mesh.shape[a] > 1)) for entry in named]
    return " ".join(entry or "." for entry in split)


def as_written(way: str) -> str:
    """Puts the axes of each dimension in `spread`'s order."""
    return " ".join("+".join(sorted(entry.split("+"))) for entry in way.split())


def kind_of(path: str) -> str:
    (kind,) = (kind for end, kind in KINDS.items() if re.search(f"{end}$", path))
    return kind


@pytest.mark.parametrize("name", names())
def test_weights_are_sharded_as_the_strategy_says(name: str) -> None:
    wanted = STRATEGIES[name]
    program = program_of(name)
    mesh, found = program.mesh, program.shardings
    shapes = abstract_variables(program.model)["params"]
    state = jax.eval_shape(program.optimizer.init, shapes)
    numbers = 0
    for (keys, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(found.params), strict=True
    ):
        path = "/".join(key.key for key in keys)
        kind = kind_of(path)
        expected = wanted.weights.get(kind, " ".join("." * len(kind.split()[1])))
        if "_blocks/" in path:  # layers in one array, in order over the stages
            expected = f"{'stage' if name == 'pipeline' else '.'} {expected}"
        assert spread(mesh, sharding.spec, leaf.ndim) == as_written(expected), path
        numbers += math.prod(sharding.shard_shape(leaf.shape))
    assert numbers == wanted.numbers
    # AdamW: two moments a weight, lying as it does; and counters.
    held = [
        (math.prod(sharding.shard_shape(leaf.shape)), leaf.ndim)
        for leaf, sharding in zip(
            jax.tree.leaves(state), jax.tree.leaves(found.optimizer), strict=True
        )
    ]
    assert sum(size for size, dimensions in held if dimensions) == 2 * numbers
    # What the documentation says that a device holds, in MiB.
    row = documented(name)
    assert row["weights"] == f"{4 * numbers / 2**20:.1f}"


class Step(NamedTuple):
    """Traced training step; `model` is the config's."""

    model: Transformer
    jaxpr: Jaxpr


def program_of(name: str) -> TrainProgram:
    experiment = experiment_named(name)
    return planned(experiment, LANGUAGES).program


@functools.cache
def step_of(name: str) -> Step:
    program = program_of(name)
    batch = {
        key: jax.ShapeDtypeStruct(
            (ROWS, LENGTH), jnp.float32 if key.endswith("weights") else jnp.int32
        )
        for key in (*ENCODER_KEYS, *DECODER_KEYS)
    }
    with program.axis_rules():
        state = jax.eval_shape(lambda: initialize(program.model, program.optimizer, 0))
        return Step(program.model, jax.make_jaxpr(program.step)(state, batch).jaxpr)


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yields the equations of a program and of the programs within it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda x: isinstance(x, (ClosedJaxpr, Jaxpr))
        ):
            if isinstance(value, (ClosedJaxpr, Jaxpr)):
                yield from equations(value.jaxpr if isinstance(value, ClosedJaxpr) else value)


def called(jaxpr: Jaxpr, primitive: str) -> list[dict[str, Any]]:
    return [e.params for e in equations(jaxpr) if e.primitive.name == primitive]


@pytest.mark.parametrize("name", names(FIRST))
def test_activations_are_sharded_as_the_strategy_says(name: str) -> None:
    model, jaxpr = step_of(name)
    # What goes through the layers at once is a third where rows go in three parts.
    rows = ROWS // 3 if name == "accumulation" else ROWS
    # Two choices a token at a capacity factor of 1.25; slots in fours, as Lingvo has them.
    E = 0 if model.encoder_experts is None else model.encoder_experts.num_experts
    C = 4 * math.ceil(2 * LENGTH / E * 1.25 / 4) if E else 0
    sizes = {"B": rows, "L": LENGTH, "M": 128, "F": 512, "V": 3072}
    sizes |= {"G": rows, "S": LENGTH, "E": E, "C": C}
    found: dict[tuple[int, ...], set[str]] = {}
    for equation in equations(jaxpr):
        if equation.primitive.name == "sharding_constraint":
            sharding, shape = equation.params["sharding"], equation.outvars[0].aval.shape
            found.setdefault(shape, set()).add(spread(sharding.mesh, sharding.spec, len(shape)))
    for letters, ways in STRATEGIES[name].arrays.items():
        shape = tuple(sizes[letter] for letter in letters)
        assert found[shape] == {*map(as_written, ways)}, letters
    # What these three do in addition to sharding, and no other one.
    # In the order of stages forward, and back in the backward pass.
    handed_on = {(tuple(p["axis_name"]), tuple(p["perm"])) for p in called(jaxpr, "ppermute")}
    ahead, back = (("stage",), ((0, 1),)), (("stage",), ((1, 0),))
    assert handed_on == ({ahead, back} if name == "pipeline" else set())
    # 2 + 2 layers, each computed again.
    assert len(called(jaxpr, "remat2")) == (4 if name == "rematerialisation" else 0)
    # All layers are in the one loop over parts of the batch.
    turns = [p["length"] for p in called(jaxpr, "scan")]
    if name == "accumulation":
        assert turns == [3]
    elif not model.scan_layers:
        assert turns == []


def test_every_strategy_is_here() -> None:
    assert [parameter.values[0] for parameter in names()] == sorted(STRATEGIES)
