"""Blocks times the matrices of their experts: by a loop, a ragged product, a kernel for TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.dispatch import grouped_matmul as module
from m4.model.dispatch.grouped_matmul import grouped_matmul
from tests.model.dispatch.shared import assert_close


def test_blocks_that_are_not_there_are_not_multiplied():
    # Were they multiplied, the NaN of their rows would be seen.
    x_NbM = jnp.full((4, 2, 3), jnp.nan).at[:2].set(1.0)
    w_EMF = jnp.ones((2, 3, 5))
    y_NbF = jax.jit(grouped_matmul)(x_NbM, w_EMF, jnp.array([0, 1, 2, 2]), jnp.array(2))
    # 1 * 1 three times.
    assert np.asarray(y_NbF)[:2].tolist() == [[[3.0] * 5] * 2] * 2
    assert not np.asarray(y_NbF)[2:].any()


def arguments(b: int, M: int, F: int):
    """(x_NbM, w_EMF, expert_N, count), d_NbF: five blocks, of which three are there."""
    rng = np.random.default_rng(0)
    shapes = ((5, b, M), (3, M, F), (5, b, F))
    x_NbM, w_EMF, d_NbF = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    return (x_NbM, w_EMF, jnp.array([0, 2, 2, 3, 3]), jnp.array(3)), d_NbF


def interpreted(x_NbM, w_EMF, expert_N, count):
    return module._megablox(x_NbM, w_EMF, expert_N, interpret=True)


def interpreted_backward(x_NbM, w_EMF, expert_N, count, d_NbF):
    return module._megablox_backward(x_NbM, w_EMF, expert_N, d_NbF, interpret=True)


@pytest.mark.parametrize(
    ("product", "backward", "sizes"),
    [
        # lax.ragged_dot runs on a CPU too, so what other platforms compute is compared here.
        (module._grouped, module._grouped_backward, (4, 6, 7)),
        (module._on_gpu, module._on_gpu_backward, (4, 6, 7)),
        # 384 has tiles of 384 and, where 256 divides nothing, of 128.
        (interpreted, interpreted_backward, (8, 256, 384)),
    ],
)
def test_the_products_of_accelerators_are_those_of_cpus(product, backward, sizes):
    given, d_NbF = arguments(*sizes)
    assert_close(product(*given), module._loop(*given), "product")
    for one, other in zip(
        backward(*given, d_NbF), module._loop_backward(*given, d_NbF), strict=True
    ):
        assert_close(one, other, "gradient")


@pytest.mark.parametrize(
    # Eleven blocks are 4 + 4 + 2 + 1 of them at once, three 2 + 1; the first expert has none, and
    # of the last one's two the second is not there.
    "sizes_E",
    [(0, 11, 3, 1, 0, 2), (17, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1), (0,) * 6],
)
def test_gradients_of_several_blocks_at_once(sizes_E):
    rng = np.random.default_rng(1)
    expert_N = np.append(np.repeat(np.arange(6), sizes_E), [6, 6])
    count = max(sum(sizes_E) - (sizes_E[-1] == 2), 0)
    N = len(expert_N)
    x_NbM, w_EMF, d_NbF = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((N, 3, 4), (6, 4, 5), (N, 3, 5))
    )

    def by_choice(x_NbM, w_EMF):
        # A block that is not there is cut off: jnp.take's fill is 0.
        w_NMF = jnp.take(
            w_EMF, jnp.where(jnp.arange(N) < count, expert_N, 6), axis=0, mode="fill", fill_value=0
        )
        return jnp.einsum("nbm,nmf->nbf", x_NbM, w_NMF)

    y_NbF, gradients = jax.vjp(by_choice, x_NbM, w_EMF)
    given = (x_NbM, w_EMF, jnp.asarray(expert_N), jnp.array(count))
    assert_close(jax.jit(module._loop)(*given), y_NbF, "product")
    for one, other in zip(
        jax.jit(module._loop_backward)(*given, d_NbF), gradients(d_NbF), strict=True
    ):
        assert_close(one, other, "gradient")


def test_tiles_divide_and_fit():
    for rows, inner, outer, itemsize in (
        (16, 1024, 8192, 2),
        (128, 8192, 1024, 4),
        (8, 384, 640, 4),
    ):
        tm, tk, tn = module._tiles(rows, inner, outer, itemsize)
        assert tm == rows
        assert inner % tk == 0
        assert outer % tn == 0
        assert tk * tn * itemsize <= 2**21
