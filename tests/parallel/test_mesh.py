"""The mesh, and sizes that do not divide over it."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec

from m4.parallel.axes import MESH_AXES
from m4.parallel.mesh import (
    axis_rules_context,
    check_divides,
    logical_spec,
    make_mesh,
    parameter_shardings,
    shard_further,
    split_axes,
)


def test_minus_one_takes_what_is_left() -> None:
    assert jax.device_count() == 8
    assert dict(make_mesh().shape) == {**dict.fromkeys(MESH_AXES, 1), "data": 8}
    assert tuple(make_mesh(expert=4).shape.values()) == (1, 2, 1, 1, 4, 1)
    assert tuple(make_mesh(node=2, expert=2).shape.values()) == (1, 2, 1, 2, 2, 1)
    assert tuple(make_mesh(expert=-1).shape.values()) == (1, 1, 1, 1, 8, 1)
    assert tuple(make_mesh(data=2, expert=-1, model=2).shape.values()) == (1, 2, 1, 1, 2, 2)
    assert tuple(make_mesh(data=2, expert=2, model=2).shape.values()) == (1, 2, 1, 1, 2, 2)
    assert make_mesh().axis_names == MESH_AXES


class Tpu:
    """Device of the first or the second of two slices of 2 x 4 chips."""

    platform, device_kind, core_on_chip = "tpu", "TPU v5 lite", 0

    def __init__(self, number: int) -> None:
        self.id, self.slice_index = number, number // 8
        self.coords = [number % 2, number // 2 % 4, 0]
        self.process_index = number // 4


TWO_SLICES = [Tpu(number) for number in range(16)]


@pytest.mark.parametrize(
    ("sizes", "shape", "across"),
    [
        ({}, {"data": 16}, "data"),
        # As many copies as slices: a config for one slice works on two.
        ({"expert": -1}, {"data": 2, "expert": 8}, "data"),
        ({"data": -1, "expert": 4}, {"data": 4, "expert": 4}, "data"),
        ({"data": 1, "node": 2, "expert": -1}, {"node": 2, "expert": 8}, "node"),
        ({"data": 2, "fsdp": 2, "expert": 2, "model": -1}, {}, "data"),
    ],
)
def test_slices_are_along_one_outer_axis(sizes: dict, shape: dict, across: str) -> None:
    mesh = make_mesh(**sizes, devices=TWO_SLICES)
    assert shape.items() <= dict(mesh.shape).items()
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    first, second = np.split(slices, 2, axis=MESH_AXES.index(across))
    assert set(first.flat) == {0}
    assert set(second.flat) == {1}
    assert len(set(mesh.devices.flat)) == 16


@pytest.mark.parametrize("sizes", [{"data": 1, "expert": -1}, {"data": 1, "fsdp": -1}])
def test_slices_that_no_outer_axis_takes(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^make_mesh.data = 1: must be a multiple of 2, the .*$"):
        make_mesh(**sizes, devices=TWO_SLICES)


@pytest.mark.parametrize("axes", [("exprt",), "expert", ("fsdp", "rows")])
def test_fsdp_axes_are_axes_of_the_mesh(axes: Any) -> None:
    said = f"Training.fsdp_axes = {axes!r}: must be a tuple of axes of the mesh"
    with pytest.raises(ValueError, match=re.escape(said)):
        parameter_shardings(make_mesh(), {}, {}, axes)


@pytest.mark.parametrize(
    ("rule", "size", "names", "said"),
    [
        # 32 buckets, as many as T5 has, over 3 parts.
        (
            ("relpos_buckets", "data"),
            (4, 32),
            ("heads", "relpos_buckets"),
            "kernel [4, 32]: its axis relpos_buckets = 32 must be divisible by 3, the mesh axes "
            "data; nearest valid sizes: 30 and 33; Training.extra_axis_rules and make_mesh decide",
        ),
        # Those of the table as well: experts [E, M, F] over model.
        (
            ("kv", "data"),
            (4, 16, 33),
            ("expert", "mlp_embed", "expert_mlp"),
            "its axis expert_mlp = 33 must be divisible by 2, the mesh axes model; ",
        ),
    ],
)
def test_parameters_that_do_not_divide(rule: tuple, size: tuple, names: tuple, said: str) -> None:
    params = {"encoder": {"kernel": jax.ShapeDtypeStruct(size, float)}}
    axes = {"encoder": {"kernel_axes": AxisMetadata(names)}}
    mesh = make_mesh(data=3, model=2, devices=jax.devices()[:6])
    with axis_rules_context(mesh, [rule]), pytest.raises(ValueError) as error:
        parameter_shardings(mesh, axes, params)
    assert said in str(error.value)
    assert str(error.value).startswith("parameter encoder/kernel")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"expert": 3},
            r"make_mesh\.expert = 3: must be .* fit 8 devices: .* multiply to 8 or.* of 1, 2, 4, 8",
        ),
        ({"data": 2, "expert": 2}, r"make_mesh\.data = 2: .*data 2 x .* expert 2 x model 1 fit 8"),
        ({"model": 0}, r"make_mesh\.model = 0: must be at least 1, or -1 for what is left"),
        ({"data": -1, "expert": -1}, r"make_mesh\.expert = -1: .* make_mesh\.data is -1 already"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        make_mesh(**sizes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("size", "nearest"),
    # The axis "batch" is sharded over data x expert = 2 x 4 = 8 devices.
    [(12, "nearest valid sizes: 8 and 16"), (5, "nearest valid size: 8"), (17, ": 16 and 24")],
)
def test_error_names_the_nearest_valid_sizes(size: int, nearest: str) -> None:
    mesh = make_mesh(data=2, expert=4)
    with pytest.raises(ValueError, match=nearest) as error:
        check_divides(mesh, "batch", size, "batch", "Training.batch_size")
    # mlp has one part here, and embed is not split at all.
    for fits, axis in ((16, "batch"), (4, "expert"), (7, "mlp"), (7, "embed")):
        check_divides(mesh, "an array", fits, axis, "SIZE")
    assert str(error.value).startswith(
        f"Training.batch_size = {size}: must be divisible by 8, the mesh axes data x expert"
    )


def test_axes_that_split() -> None:
    # An axis of one part splits nothing, and so is not what a message should name.
    mesh = make_mesh(data=1, node=2, expert=4)
    assert split_axes(mesh, "batch") == split_axes(mesh, "expert") == ("node", "expert")
    assert split_axes(mesh, "expert_replicas") == split_axes(mesh, "embed") == ()
    with nn.logical_axis_rules([("batch", ("expert", "data"))]):  # as T5X's dense ones
        assert split_axes(mesh, "batch") == ("expert",)
        assert split_axes(mesh, "expert") == split_axes(mesh, "expert_replicas") == ()
    with pytest.raises(ValueError, match="by 8, the mesh axes node x expert"):
        check_divides(mesh, "experts", 12, "expert", "num_experts")


@pytest.mark.parametrize(
    ("spec", "shape", "fixed", "split"),
    [
        ((None, "model"), (8, 16), (), (None, ("model", "data", "fsdp"))),  # the largest
        ((None, "model"), (8, 12), (), (("data", "fsdp"), "model")),  # 12 / 8 parts: no
        (("layers", None), (8, 4), (0,), ("layers", ("data", "fsdp"))),
        ((("node", "expert"), None), (4, 8), (), (("node", "expert"), ("data", "fsdp"))),
        ((), (4,), (), (("data", "fsdp"),)),
        ((), (6,), (), ()),  # small: it stays whole
        (("fsdp",), (4, 2), (), (("fsdp", "data"), None)),  # no axis twice
    ],
)
def test_weights_are_sharded_further(spec: tuple, shape: tuple, fixed: tuple, split: tuple) -> None:
    mesh = make_mesh(data=2, fsdp=2, model=2)
    found = shard_further(mesh, PartitionSpec(*spec), shape, ("data", "fsdp", "expert"), fixed)
    assert tuple(found) == split


def test_extra_rules_split_what_the_table_leaves_whole() -> None:
    # The dense Transformer in two dimensions (GSPMD, arXiv 2105.04663, section 5.1): weights over
    # (width, inner width), activations over (rows, width).
    with axis_rules_context(make_mesh(data=4, model=2), [("embed", "data"), ("embed", "model")]):
        everywhere = ("data", "fsdp", "node", "expert")
        assert logical_spec(("embed", "mlp")) == PartitionSpec("data", "model")
        assert logical_spec(("batch", "length", "embed")) == PartitionSpec(
            everywhere, None, "model"
        )
        assert logical_spec(("batch", "length", "mlp")) == PartitionSpec(everywhere, None, "model")
        with pytest.raises(ValueError, match="width = 6: must be divisible by 4"):
            check_divides(make_mesh(data=4, model=2), "width", 6, "embed", "width")
        with pytest.raises(ValueError, match=r"width = 5: .* 2, the mesh axes model"):
            check_divides(make_mesh(data=1, fsdp=4, model=2), "width", 5, "embed", "width")
        # An evaluation in the middle of training.
        with axis_rules_context(make_mesh(data=4, model=2)):
            assert logical_spec(("embed", "mlp")) == PartitionSpec("data", "model")
    assert logical_spec(("embed", "mlp")) == PartitionSpec(None, "model")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (("embeds", "data"), r"'embeds' is no axis \(batch, "),
        (("embed", "dta"), r"'dta' is no axis \(.*; of the mesh stage, "),
        (("embed", ("data", "x")), r"'x' is no axis"),
        (("embed",), r"must be a pair of a logical axis and mesh axes"),
        (
            ("heads", "data"),
            r"leaves whole .*'kv'.* it has no effect on 'heads', which is split over 'model'",
        ),
    ],
)
def test_rules_without_effect_are_refused(rule: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error, axis_rules_context(make_mesh(), [rule]):
        pass
    assert str(error.value).startswith("Training.extra_axis_rules = (")
