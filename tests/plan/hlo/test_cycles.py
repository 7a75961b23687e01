"""The TPU compiler's estimates of cycles, loops multiplied out."""

from m4.plan.hlo.collectives import measure, measure_by_loop

# As the TPU compiler writes it: no trip count at the loop, the largest number where it has no
# estimate. The loop counts from 0 to 7 by 2: four iterations.
TEXT = """\
HloModule step, is_scheduled=true, num_partitions=4

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %y = f32[8] fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"100"}
  %z = f32[8] custom-call(%y), custom_call_target="tpu_custom_call"
  ROOT %t = (s32[], f32[8]) tuple(%next, %z)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(7)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %a = f32[8] fusion(%x), kind=kLoop, calls=%g, backend_config={"estimated_cycles":"7"}
  %b = f32[8] copy(%a), backend_config={"estimated_cycles":"9223372036854775807"}
  %t = (s32[], f32[8]) tuple(%zero, %b)
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body
  ROOT %r = f32[8] get-tuple-element(%w), index=1
}
"""


def test_cycles_are_multiplied_by_the_iterations_of_their_loop() -> None:
    found = measure(TEXT)
    assert found.cycles == 7 + 4 * 100
    # The copy, and four custom kernels.
    assert found.uncosted == 1 + 4
    assert not found.loops_unknown
    assert found.collectives == []


def test_loop_of_unknown_length_is_marked() -> None:
    found = measure(TEXT.replace("constant(7)", "parameter(1)"))
    assert (found.cycles, found.uncosted, found.loops_unknown) == (107, 2, True)


def test_what_runs_once_and_one_iteration_are_measured_separately() -> None:
    # A search: its loop's length is not in the text, that of a loop within it is (four iterations).
    found = measure_by_loop(SEARCH)
    assert found.loops == 1
    assert not found.once.loops_unknown
    assert found.iteration.loops_unknown
    # Before and after the loop the same product, 2 * 8 * 8 * 8; in an iteration that too, and four
    # times one of 2 * 4 * 8 * 8.
    assert found.once.flops == 2 * (2 * 8 * 8 * 8)
    assert found.iteration.flops == 2 * 8 * 8 * 8 + 4 * (2 * 4 * 8 * 8)
    assert [each.times for each in found.once.collectives] == [2]
    assert [each.times for each in found.iteration.collectives] == [1, 4]
    assert [found.once.cycles, found.iteration.cycles] == [2 * 10, 10 + 4 * 3 + 5]
    # `measure` adds up both.
    whole = measure(SEARCH)
    assert whole.flops == found.once.flops + found.iteration.flops
    assert whole.cycles == found.once.cycles + found.iteration.cycles
    assert whole.loops_unknown
    # Without such a loop there are no iterations.
    known = measure_by_loop(TEXT)
    assert (known.loops, known.iteration.cycles, known.once) == (0, 0, measure(TEXT))


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
