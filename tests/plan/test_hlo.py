"""Collectives and cycles in the texts of compiled programs, loops multiplied out."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from m4.plan.hlo import collectives, read, read_groups, summary, type_bytes


def mesh_of(order: np.ndarray) -> Mesh:
    names = ("a", "b", "c")[: order.ndim]
    return Mesh(np.array(jax.devices())[order], names, axis_types=(AxisType.Auto,) * order.ndim)


def text_of(function: Callable, mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> str:
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    return jax.jit(function).lower(x).compile().as_text() or ""


CUBE = np.arange(8).reshape(2, 2, 2)


@functools.cache
def nested() -> str:
    """Returns a program's text: 5 x 3 sums over a and c, and exchanges in an unbounded loop."""

    def inner(x, _):
        return lax.psum(x, ("a", "c")) * 0.5, None

    def outer(x, _):
        return lax.scan(inner, x, None, length=3)[0], None

    def body(x):
        x = lax.scan(outer, x, None, length=5)[0]
        x = lax.while_loop(
            lambda x: x.sum() < 10.0, lambda x: lax.all_to_all(x, "c", 0, 0, tiled=True) + 1.0, x
        )
        return lax.psum_scatter(x, ("b", "c"), tiled=True)

    spec = PartitionSpec("a")
    mesh = mesh_of(CUBE)
    whole = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return text_of(whole, mesh, spec, (16, 8))


def test_loops_multiply() -> None:
    found = {c.kind: c for c in collectives(nested())}
    # Each device has [16/2, 8] float32 = 256 bytes.
    psum = found["all-reduce"]
    assert psum.times == 5 * 3
    assert psum.operand_bytes == psum.result_bytes == 256
    # Devices are numbered 4a + 2b + c: those that differ in a and c alone work together.
    assert psum.groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    # A ring of four sends 2 * 3/4 of its operand.
    assert psum.sent_bytes == 384
    scattered = found["reduce-scatter"]
    assert (scattered.operand_bytes, scattered.result_bytes, scattered.times) == (256, 64, 1)
    assert scattered.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert scattered.sent_bytes == 192
    total = summary(found.values())["all-reduce"]
    assert (total.count, total.operand_bytes, total.sent_bytes) == (15, 15 * 256, 15 * 384)


def test_loop_of_unknown_length_counts_once() -> None:
    found = read(nested())
    (exchange,) = found.iteration.collectives
    assert (exchange.kind, exchange.times, found.loops) == ("all-to-all", 1, 1)
    assert exchange.operand_bytes == exchange.result_bytes == 256  # two pieces of 128
    assert exchange.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize("length", [1, 4])
def test_loop_counts_as_its_unrolled_steps(length: int) -> None:
    def function(x, unroll):
        def step(x, _):
            return jnp.tanh(x @ weights), x.sum(0)

        weights = jnp.ones((8, 8))
        return lax.scan(step, x, None, length=length, unroll=unroll)

    def total(unroll: int):
        function_ = functools.partial(function, unroll=unroll)
        return summary(collectives(text_of(function_, mesh_of(CUBE), PartitionSpec("a"), (16, 8))))

    looped, written_out = total(1), total(length)
    assert looped["all-reduce"].count == length
    # XLA may make one all-reduce of several written-out ones; their bytes are the same: a sum of
    # 8 float32 a step.
    assert looped["all-reduce"].operand_bytes == 8 * 4 * length
    assert written_out["all-reduce"].operand_bytes == 8 * 4 * length


def test_groups_of_a_program_on_devices_in_another_order() -> None:
    # HLO numbers the devices of a program in the order of its mesh: 4a + 2b + c again.
    order = np.array([3, 1, 2, 0, 7, 6, 5, 4]).reshape(2, 2, 2)
    text = text_of(lambda x: x.sum(0), mesh_of(order), PartitionSpec(("a", "c")), (16, 8))
    assert [(c.kind, c.groups) for c in collectives(text)] == [
        ("all-reduce", ((0, 1, 4, 5), (2, 3, 6, 7)))
    ]


# As the TPU compiler writes it: no trip counts at the loops, constants of the counter in
# the loop's condition, copied starts, tiles in layouts, fusions of all-reduce and slice, the
# largest number where it has no estimate of cycles.
TPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=16

%add.clone (x.3: f32[], y.1: f32[]) -> f32[] {
  %y.1 = f32[]{:T(256)} parameter(1)
  %x.3 = f32[]{:T(256)} parameter(0)
  ROOT %add.18 = f32[]{:T(256)} add(%x.3, %y.1)
}

%all-reduce-scatter.clone.1 (input.2: f32[32,1024]) -> f32[32,256] {
  %input.2 = f32[32,1024]{1,0:T(8,128)} parameter(0)
  %all-reduce.6 = f32[32,1024]{1,0:T(8,128)} all-reduce(%input.2), channel_id=1, \
replica_groups=[4,4]<=[16], use_global_device_ids=true, to_apply=%add.clone
  %constant.150 = u32[] constant(0)
  ROOT %slice = f32[32,256]{1,0:T(8,128)} dynamic-slice(%all-reduce.6, %constant.150), \
dynamic_slice_sizes={32,256}
}

%wide.body.sunk (wide.param.5: (s32[], f32[32,256], /*index=2*/s32[])) -> (s32[], f32[32,256], \
s32[]) {
  %constant.7 = s32[]{:T(256)} constant(STEP)
  %wide.param.5 = (s32[]{:T(256)}, f32[32,256]{1,0:T(8,128)}, /*index=2*/s32[]{:T(256)}) \
parameter(0)
  %get-tuple-element.72 = s32[]{:T(256)} get-tuple-element(%wide.param.5), index=0
  %add.13 = s32[]{:T(256)} add(%get-tuple-element.72, %constant.7)
  %get-tuple-element.73 = f32[32,256]{1,0:T(8,128)} get-tuple-element(%wide.param.5), index=1
  %get-tuple-element.77 = s32[]{:T(256)} get-tuple-element(%wide.param.5), index=2
  %all-gather = f32[32,1024]{1,0:T(8,128)S(1)} all-gather(%get-tuple-element.73), channel_id=2, \
replica_groups=mesh['axis_0'=4,'axis_1'=4] {'axis_1'}, dimensions={1}
  %custom-call.1 = f32[32,1024] custom-call(%all-gather), custom_call_target="tpu_custom_call"
  %fusion.28 = f32[32,256]{1,0:T(8,128)} fusion(%custom-call.1), kind=kCustom, \
calls=%all-reduce-scatter.clone.1, backend_config={"estimated_cycles":"100"}
  ROOT %tuple.34 = (s32[]{:T(256)}, f32[32,256]{1,0:T(8,128)}, /*index=2*/s32[]{:T(256)}) \
tuple(%add.13, %fusion.28, /*index=2*/%get-tuple-element.77)
}

%wide.condition (wide.param.1: (s32[], f32[32,256], /*index=2*/s32[])) -> pred[] {
  %constant.4 = s32[]{:T(256)} constant(LIMIT)
  %wide.param.1 = (s32[]{:T(256)}, f32[32,256]{1,0:T(8,128)}, /*index=2*/s32[]{:T(256)}) \
parameter(0)
  %get-tuple-element.40 = s32[]{:T(256)} get-tuple-element(%wide.param.1), index=0
  ROOT %lt.9 = pred[]{:T(1024)} compare(%get-tuple-element.40, %constant.4), direction=LT
}

ENTRY %main.11_spmd (param.7: f32[32,256]) -> f32[32,256] {
  %constant.19 = s32[]{:T(256)} constant(START)
  %copy.10 = s32[]{:T(256)} copy(%constant.19)
  %param.7 = f32[32,256]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %collective-permute-start = (f32[32,256]{1,0:T(8,128)}, f32[32,256]{1,0:T(8,128)S(1)}, \
u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%param.7), channel_id=1, \
source_target_pairs={{0,8},{8,0}}, metadata={op_name="jit(g)/ppermute" stack_frame_id=18}
  %collective-permute-done = f32[32,256]{1,0:T(8,128)S(1)} \
collective-permute-done(%collective-permute-start), backend_config={"estimated_cycles":"7"}
  %copy.11 = f32[8] copy(%a), backend_config={"estimated_cycles":"9223372036854775807"}
  %tuple.35 = (s32[]{:T(256)}, f32[32,256]{1,0:T(8,128)}, /*index=2*/s32[]{:T(256)}) \
tuple(%copy.10, %collective-permute-done, /*index=2*/%constant.19)
  %while.32 = (s32[]{:T(256)}, f32[32,256]{1,0:T(8,128)}, /*index=2*/s32[]{:T(256)}) \
while(%tuple.35), condition=%wide.condition, body=%wide.body.sunk, \
metadata={op_name="jit(g)/while" stack_frame_id=12}
  ROOT %get-tuple-element.27 = f32[32,256]{1,0:T(8,128)} get-tuple-element(%while.32), index=1
}
"""


def tpu(start: object = 0, step: object = 1, limit: object = 6) -> str:
    text = TPU.replace("START", str(start)).replace("STEP", str(step))
    return text.replace("LIMIT", str(limit))


def test_collectives_of_the_tpu_compiler() -> None:
    found = {c.kind: c for c in collectives(tpu())}
    assert {kind: c.times for kind, c in found.items()} == {
        "reduce-scatter": 6,
        "all-gather": 6,
        "collective-permute": 1,
    }
    fused, gathered, moved = found.values()
    # [32, 1024] float32 to [32, 256] over groups of four neighbours.
    assert (fused.operand_bytes, fused.result_bytes) == (131072, 32768)
    assert fused.groups[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (gathered.operand_bytes, gathered.result_bytes) == (32768, 131072)
    assert gathered.groups == fused.groups
    # The start's tuple has operand and result, and two flags, which do not count.
    assert (moved.operand_bytes, moved.result_bytes, moved.sent_bytes) == (32768, 32768, 32768)
    assert moved.groups == ((0, 8), (8, 0))


@pytest.mark.parametrize(
    ("counter", "times", "unknown"),
    [
        ({"start": 2}, 4, False),
        ({"step": 4}, 2, False),  # 0, 4
        ({"start": -1, "step": 2, "limit": 6}, 4, False),  # -1, 1, 3, 5
        ({"step": 0}, 1, True),
        ({"limit": "%other"}, 1, True),
    ],
)
def test_trips_from_start_step_and_limit(counter: dict, times: int, unknown: bool) -> None:
    found = read(tpu(**counter))
    (gathered,) = (each for each in found.whole.collectives if each.kind == "all-gather")
    assert (gathered.times, found.loops) == (times, unknown)


@pytest.mark.parametrize("name", ["rounds_of_rows", "transpose(jvp(rounds_of_rows))"])
def test_rows_travel_in_one_round_as_for_a_balanced_routing(name: str) -> None:
    text = TPU.replace("LIMIT", "%other").replace("jit(g)/while", f"jit(g)/{name}/while")
    (gathered,) = (each for each in collectives(text) if each.kind == "all-gather")
    assert gathered.times == 1
    assert not read(text).loops


START = """\
HloModule m, num_partitions=4, replica_count=2

%wrapped (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-to-all.1 = f32[8]{0} all-to-all(%p), replica_groups={{0,1,2,3},{4,5,6,7}}
}

%taken (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-reduce.3 = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}

ENTRY %main (p: f32[8], q: pred[]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = pred[] parameter(1)
  %gs = ((bf16[8]{0}, s4[6]{0}), (bf16[64]{0}, s4[48]{0})) all-gather-start(%p, %i), \
replica_groups={}, dimensions={0}
  %rs = (f32[8]{0}, f32[16]{0}) all-reduce-start(%p, %r), replica_groups={{0,2}}, to_apply=%add
  %as = ((f32[8]{0}), f32[8]{0}, s32[]) async-start(%p), calls=%wrapped
  %c = f32[8]{0} conditional(%q, %p, %p), true_computation=%taken, false_computation=%taken
  ROOT %done = f32[8]{0} async-done(%as), metadata={op_name="an all-gather(x) of mine"}
}
"""


def test_asynchronous_wrapped_and_branched_collectives() -> None:
    found = {c.name: c for c in collectives(START)}
    assert {name: (c.kind, c.times) for name, c in found.items()} == {
        "gs": ("all-gather", 1),
        "rs": ("all-reduce", 1),
        "all-to-all.1": ("all-to-all", 1),
        "all-reduce.3": ("all-reduce", 2),  # both branches
    }
    # 8 bfloat16 and 6 packed int4; eight times as much comes out: 4 partitions x 2 replicas.
    assert (found["gs"].operand_bytes, found["gs"].result_bytes) == (16 + 3, 128 + 24)
    assert found["gs"].groups == (tuple(range(8)),)
    # The start of an all-reduce of two arrays gives both, and not its operands.
    assert found["rs"].operand_bytes == 32 + 64


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4] {'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=2,'y'=4] {'x'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=4] {'y','x'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        # The outer and the inner half of y: of y = 2 * outer + inner.
        ("mesh['x'=2,'y'=4] {'y':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'y'}", ((3, 1), (2, 0))),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", ((0, 2), (1, 3))),
    ],
)
def test_notations_of_groups(text: str, groups: tuple) -> None:
    assert read_groups(f"all-reduce(%x), replica_groups={text}, to_apply=%add", 8) == groups


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[2,8]{1,0:T(8,128)}", 64),
        ("bf16[]", 2),
        ("(pred[3], f8e4m3fn[4]{0}, token[])", 7),
        ("u4[3]", 2),
        ("c64[2]", 16),
        ("s32[<=5]", 20),
    ],
)
def test_bytes_of_types(text: str, size: int) -> None:
    assert type_bytes(text) == size


def test_unreadable_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        collectives("module @jit_f {}")
    with pytest.raises(ValueError, match="unknown size of wide"):
        type_bytes("wide[3]")
    line = _SEND.format(1, "8", '"{1,2}x{0:3}"', "GOSSIP")
    with pytest.raises(ValueError, match="no readable transfer between slices"):
        collectives(TWO_SLICES.replace("%s", line))
    with pytest.raises(ValueError, match="no readable replica groups"):
        read_groups("%a = all-reduce(%x), replica_groups=?{1}", 8)


# As libtpu prints a program for two slices of four devices: what stays inside a slice is an
# ordinary collective, what crosses is handed to the host.
TWO_SLICES = """HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main {
  %all-to-all = bf16[4,1,640,512]{3,2,1,0} all-to-all(%x), replica_groups={{0,1,2,3}}
  %reduce-scatter.1 = f32[256,128]{1,0} reduce-scatter(%g), replica_groups={{0,1,2,3}}
%s
}
"""
_SEND = (
    "  %send.{} = (f32[{}]{{1,0:T(8,128)}}, u32[], token[]) send(%x, %after-all), channel_id=2, "
    'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="psum.7_0",'
    '_xla_megascale_target={},_xla_megascale_transfer_type="{}"}}, metadata={{op_name="jit/psum"}}'
)
THERE, BACK = "{100000->200000}", "{200000->100000}"
_RECEIVE = _SEND.replace("send", "recv")


@pytest.mark.parametrize(
    ("transfer", "target", "kind", "result", "sent", "groups"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:3}"', "all-reduce", 1, 1, ((0, 4), (1, 5), (2, 6), (3, 7))),
        # Over three slices a ring sends 2 * 2/3 of it.
        ("ALL_REDUCE", '"{1,2,3}x{0:1}"', "all-reduce", 1, 4 / 3, ((0, 4, 8), (1, 5, 9))),
        ("ALL_GATHER", '"{1,2}x{1,3}"', "all-gather", 2, 1, ((1, 5), (3, 7))),
        ("REDUCE_SCATTER", '"{1:2}x{0}"', "reduce-scatter", 1 / 2, 1 / 2, ((0, 4),)),
        ("ALL_TO_ALL", "{{100000,200000},{100003,200003}}", "all-to-all", 1, 0.5, ((0, 4), (3, 7))),
        # All devices of both slices: half of it leaves the slice.
        ("ALL_TO_ALL", "{{100001,100000,200001,200000}}", "all-to-all", 1, 1 / 2, ((1, 0, 5, 4),)),
        ("ONE_TO_ONE", f"{{{THERE},{BACK}}}", "collective-permute", 1, 1, ((0, 4), (4, 0))),
    ],
)
def test_exchanges_between_slices(
    transfer: str, target: str, kind: str, result: float, sent: float, groups: tuple
) -> None:
    size = 256 * 128 * 4
    lines = [line.format(1, "256,128", target, transfer) for line in (_SEND, _RECEIVE)]
    found = collectives(TWO_SLICES.replace("%s", "\n".join(lines)))
    inside = [each for each in found if each.slices == 1]
    assert [each.kind for each in inside] == ["all-to-all", "reduce-scatter"]
    assert {each.groups for each in inside} == {((0, 1, 2, 3),)}
    (between,) = [each for each in found if each.slices > 1]
    assert (between.kind, between.groups) == (kind, groups)
    assert between.slices == len({device // 4 for device in groups[0]})
    assert between.operand_bytes == size
    assert between.result_bytes == result * size
    assert between.sent_bytes == pytest.approx(sent * size)


def test_cycles_are_multiplied_by_the_iterations_of_their_loop() -> None:
    found = read(tpu(limit=4))
    assert found.whole.cycles == 7 + 4 * 100
    # The copy, and four custom kernels.
    assert (found.whole.uncosted, found.whole.kernels, found.loops) == (1 + 4, 4, 0)
    assert (found.iteration.cycles, found.once) == (0, found.whole)
    unknown = read(tpu(limit="%other"))
    assert (unknown.whole.cycles, unknown.whole.uncosted, unknown.loops) == (107, 2, 1)


def test_work_outside_and_inside_of_a_loop_is_separate() -> None:
    # A search: its loop's length is not in the text, that of a loop within it is (four iterations).
    found = read(SEARCH)
    assert found.loops == 1
    assert [each.times for each in found.once.collectives] == [2]
    assert [each.times for each in found.iteration.collectives] == [1, 4]
    assert [found.once.cycles, found.iteration.cycles] == [2 * 10, 10 + 4 * 3 + 5]
    assert found.whole.cycles == found.once.cycles + found.iteration.cycles


SEARCH = """\
HloModule search, is_scheduled=true, num_partitions=4

%both (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %y = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r = f32[8,8] all-reduce(%y), replica_groups={{0,1,2,3}}, to_apply=%add, \
backend_config={"estimated_cycles":"10"}
}

%layer (p: (s32[], f32[4,8], f32[8,8])) -> (s32[], f32[4,8], f32[8,8]) {
  %p = (s32[], f32[4,8], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8] get-tuple-element(%p), index=1
  %w = f32[8,8] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[4,8] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %z = f32[4,8] all-reduce(%y), replica_groups={{0,1,2,3}}, to_apply=%add, \
backend_config={"estimated_cycles":"3"}
  ROOT %t = (s32[], f32[4,8], f32[8,8]) tuple(%next, %z, %w)
}

%layers (p: (s32[], f32[4,8], f32[8,8])) -> pred[] {
  %p = (s32[], f32[4,8], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(4)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%step (p: (f32[4,8], f32[8,8])) -> (f32[4,8], f32[8,8]) {
  %p = (f32[4,8], f32[8,8]) parameter(0)
  %x = f32[4,8] get-tuple-element(%p), index=0
  %w = f32[8,8] get-tuple-element(%p), index=1
  %v = f32[8,8] fusion(%w), kind=kLoop, calls=%both
  %zero = s32[] constant(0)
  %t = (s32[], f32[4,8], f32[8,8]) tuple(%zero, %x, %v)
  %l = (s32[], f32[4,8], f32[8,8]) while(%t), condition=%layers, body=%layer
  %y = f32[4,8] get-tuple-element(%l), index=1
  ROOT %r = (f32[4,8], f32[8,8]) tuple(%y, %v)
}

%continues (p: (f32[4,8], f32[8,8])) -> pred[] {
  %p = (f32[4,8], f32[8,8]) parameter(0)
  ROOT %c = pred[] custom-call(%p), custom_call_target="any", \
backend_config={"estimated_cycles":"5"}
}

ENTRY %main (x: f32[4,8], w: f32[8,8]) -> f32[8,8] {
  %x = f32[4,8] parameter(0)
  %w = f32[8,8] parameter(1)
  %v = f32[8,8] fusion(%w), kind=kLoop, calls=%both
  %t = (f32[4,8], f32[8,8]) tuple(%x, %v)
  %s = (f32[4,8], f32[8,8]) while(%t), condition=%continues, body=%step
  %u = f32[8,8] get-tuple-element(%s), index=1
  ROOT %r = f32[8,8] fusion(%u), kind=kLoop, calls=%both
}
"""
