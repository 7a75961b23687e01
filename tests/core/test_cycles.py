"""The TPU compiler's estimates of cycles, loops multiplied out."""

from m4.core.collectives import measure

# As the TPU's compiler writes it: no trip count beside the loop, the largest number where it has no
# estimate. The loop goes from 0 to 7 by 2: four times.
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


def test_cycles_are_multiplied_by_the_turns_of_their_loop() -> None:
    found = measure(TEXT)
    assert found.cycles == 7 + 4 * 100
    # The copy, and four kernels of others.
    assert found.uncosted == 1 + 4
    assert not found.loops_unknown
    assert found.collectives == []


def test_a_loop_of_unknown_length_is_said_to_be_one() -> None:
    found = measure(TEXT.replace("constant(7)", "parameter(1)"))
    assert (found.cycles, found.uncosted, found.loops_unknown) == (107, 2, True)
