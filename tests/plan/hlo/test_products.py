"""Operations of products, counted in the texts of compiled programs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from m4.plan.hlo.collectives import measure
from m4.plan.hlo.products import _meetings


def compiled(function: Callable, *shapes: tuple[int, ...]) -> int:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = measure(jax.jit(function).lower(*arguments).compile().as_text() or "")
    assert not found.unread
    return found.flops


def test_product_and_batched_product() -> None:
    assert compiled(jnp.dot, (32, 64), (64, 128)) == 2 * 32 * 64 * 128
    # Four of [32, 64] and [64, 16].
    product = functools.partial(jnp.einsum, "bqd,bkd->bqk")
    assert compiled(product, (4, 32, 64), (4, 16, 64)) == 4 * 2 * 32 * 64 * 16
    assert compiled(jnp.add, (32, 64), (32, 64)) == 0


def test_loops_multiply() -> None:
    def inner(x, w):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]

    def outer(x, w):
        return lax.scan(lambda x, _: (inner(x, w), None), x, None, length=5)[0] @ w

    # 5 x 3 in the loops and one behind them.
    assert compiled(outer, (32, 64), (64, 64)) == 16 * 2 * 32 * 64 * 64


def test_gradients_add_two_products() -> None:
    def loss(x, w):
        return jnp.tanh(x @ w).sum()

    assert compiled(jax.grad(loss, (0, 1)), (32, 64), (64, 128)) == 3 * 2 * 32 * 64 * 128


# Lines of a training step for TPU v3, where all products are convolutions.
TPU = """\
HloModule step, is_scheduled=true, num_partitions=128

%fused (a: bf16[64,128,16,128], b: bf16[64,128,16,128]) -> f32[64,16,128,128] {
  %a = bf16[64,128,16,128]{3,1,2,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[64,128,16,128]{3,1,2,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution-base-dilated.84 = f32[64,16,128,128]{2,3,1,0:T(8,128)} convolution(%a, %b), \
window={size=64x16 stride=63x15 lhs_dilate=64x16}, dim_labels=0b1f_0o1i->01bf
}

%fused.1 (a: bf16[64,128,1024,1], b: bf16[16,128,1024,1]) -> bf16[64,128,16,128] {
  %a = bf16[64,128,1024,1]{2,1,3,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[16,128,1024,1]{2,1,0,3:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.551 = bf16[64,128,16,128]{3,1,2,0:T(8,128)(2,1)} convolution(%a, %b), \
window={size=1x16 pad=0_0x15_15 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f
}

%fused.2 (a: bf16[8192,1024], b: bf16[8192,2048]) -> f32[1024,2048] {
  %a = bf16[8192,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[8192,2048]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.593 = f32[1024,2048]{1,0:T(8,128)} convolution(%a, %b), dim_labels=fb_io->bf
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %p = bf16[64,128,16,128] custom-call(), custom_call_target="AllocateBuffer"
  %y = f32[64,16,128,128] fusion(%p, %p), kind=kOutput, calls=%fused
  %q = bf16[64,128,16,128] fusion(%p, %p), kind=kOutput, calls=%fused.1
  %q2 = bf16[64,128,16,128] fusion(%p, %p), kind=kOutput, calls=%fused.1
  %z = f32[1024,2048] fusion(%p, %p), kind=kOutput, calls=%fused.2
  %k = f32[8] custom-call(%x, %x), custom_call_target="tpu_custom_call"
  ROOT %r = f32[8] add(%x, %k)
}
"""


def test_products_of_the_tpu_compiler() -> None:
    found = measure(TPU)
    # 64 sentences of 16 heads, queries [128, 128] and keys [128, 128]: windows as large as the
    # batch, of which one element each meets another. Projections of 64 * 128 tokens from 1,024 to
    # 16 * 128 numbers, twice; and the gradient of such weights.
    assert found.flops == 2 * 64 * 16 * 128**3 + (2 + 1) * 2 * (64 * 128) * 1024 * (16 * 128)
    # What others' kernels do cannot be read.
    assert found.unread == {"tpu_custom_call": 1}


GPU = """\
HloModule step, is_scheduled=true

%gemm_fusion_dot.1_computation (p0: f32[32,64], p1: f32[64,16]) -> f32[32,16] {
  %p0 = f32[32,64]{1,0} parameter(0)
  %p1 = f32[64,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[32,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[32,64], b: f32[64,16]) -> f32[32,16] {
  %a = f32[32,64]{1,0} parameter(0)
  %b = f32[64,16]{1,0} parameter(1)
  %gemm_fusion_dot.1 = f32[32,16]{1,0} fusion(%a, %b), kind=kCustom, \
calls=%gemm_fusion_dot.1_computation, backend_config={"fusion_backend_config":{}}
  %custom-call.1 = (f32[32,16]{1,0}, s8[4194304]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %custom-call.2 = (f32[32,16]{1,0}, u8[0]{0}) custom-call(%a, %b), \
custom_call_target="__cudnn$convForward", window={size=1}, dim_labels=bf0_oi0->bf0
  %custom-call.3 = (f32[32]{0}, u8[0]{0}) custom-call(%a, %b), \
custom_call_target="__cub$DeviceRadixSort"
  %custom-call.4 = f32[32,16]{1,0} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
  ROOT %ragged = f32[32,16]{1,0} ragged-dot(%a, %b), lhs_contracting_dims={1}
}
"""


def test_products_of_the_gpu_compiler() -> None:
    found = measure(GPU)
    # A Triton fusion and cuBLAS, the same product; what cannot be read is reported, not guessed: a
    # convolution of cuDNN's, a GEMM without its axes, a ragged product.
    assert found.flops == 2 * (2 * 32 * 64 * 16)
    assert found.unread == {"__cudnn$convForward": 1, "__cublas$lt$matmul": 1, "ragged-dot": 1}


def test_window_counts_only_elements_that_it_covers() -> None:
    """Against the operand and the window laid out with their gaps."""
    sizes = itertools.product((1, 2, 5), (1, 3, 4), (1, 2, 3), (0, 1, 3), (1, 2, 4), (1, 2, 3))
    for left, kernel, stride, pad, left_step, kernel_step in sizes:
        places = [pad + i * left_step for i in range(left)]
        end = places[-1] + pad - kernel_step * (kernel - 1)
        starts = range(0, max(end + 1, 0), stride)
        covered = [start + k * kernel_step for start in starts for k in range(kernel)]
        found = _meetings(left, kernel, len(starts), stride, pad, left_step, kernel_step)
        assert found == sum(place in places for place in covered)
