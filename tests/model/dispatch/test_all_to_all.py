"""The exchanging implementations: without a mesh, what does not divide, what type travels."""

import jax
import jax.numpy as jnp
import pytest

from m4.model.dispatch.all_to_all import all_to_all
from m4.model.dispatch.gather import gather
from m4.model.dispatch.hierarchical_all_to_all import hierarchical_all_to_all
from tests.model.dispatch.shared import Setting, numbers, on, random_plan

both = pytest.mark.parametrize("run", [all_to_all, hierarchical_all_to_all])


def arguments(setting: Setting):
    x_GSM, _, experts = numbers(0, setting)
    return x_GSM, random_plan(0, *setting[1:]), experts


@both
@pytest.mark.parametrize("mesh", [None, {"data": 8}, {"data": 4, "model": 2}])
def test_without_sharded_experts_there_is_no_exchange(run, mesh):
    setting = Setting(mesh, 3, 4, 4, 2, 2)  # three groups: no matter
    with on(mesh):
        program = jax.make_jaxpr(run)(*arguments(setting))
        assert str(program) == str(jax.make_jaxpr(gather)(*arguments(setting)))


@both
@pytest.mark.parametrize("G", [1, 3, 12])
def test_groups_that_do_not_divide(run, G):
    setting = Setting({"data": 2, "expert": 4}, G, 4, 4, 2, 2)
    said = (
        r"^number of groups \(tokens / MoeLayer.group_tokens; "
        r"tokens of Training.batch_size in training, of Decoding.batch_rows in translation\) = "
        rf"{G}: must be divisible by 8, the mesh axes data x expert; .* \({run.__name__}\)"
    )
    with on(setting.mesh), pytest.raises(ValueError, match=said):
        jax.eval_shape(run, *arguments(setting))


@both
def test_experts_that_do_not_divide(run):
    setting = Setting({"data": 1, "node": 2, "expert": 4}, 8, 4, 12, 2, 2)
    said = "MoeLayer.num_experts = 12: .* 8, the mesh axes node x expert"
    with on(setting.mesh), pytest.raises(ValueError, match=said):
        jax.eval_shape(run, *arguments(setting))


@both
def test_bfloat16_travels_as_bfloat16(run):
    setting = Setting({"data": 2, "node": 2, "expert": 2}, 8, 4, 4, 2, 2)
    x_GSM, routing, experts = arguments(setting)
    experts = jax.tree.map(lambda x: x.astype(jnp.bfloat16), experts)
    with on(setting.mesh):
        lines = jax.jit(run).lower(x_GSM.astype(jnp.bfloat16), routing, experts).as_text()
    exchanges = [line for line in lines.splitlines() if "stablehlo.all_to_all" in line]
    assert len(exchanges) == {all_to_all: 2, hierarchical_all_to_all: 4}[run]
    assert all("bf16>) ->" in line and "f32" not in line for line in exchanges)
