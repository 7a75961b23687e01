"""Products have the gradients of the plain einsums, router's and logits' full float32 precision."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.product import product, tied_logits
from m4.plan import launch
from tests.model.compiled_step import COMPILED, KINDS, LOGITS, ROUTER, Product, gradient, products

# More columns than rows of the weight, and fewer, also with an even number of cache lines a row
# (64 numbers are 4 in float32, 2 in bfloat16): the ways of a weight's gradient.
SIDES = [(3, 5), (7, 2), (64, 2), (40, 50), (50, 40)]


def drawn(*shapes: tuple[int, ...], dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def assert_same_with_gradients(ours, plain, x, w, direction) -> None:
    results = [jax.jit(lambda x, w, f=f: jax.vjp(f, x, w)[1](direction)) for f in (ours, plain)]
    np.testing.assert_allclose(ours(x, w), plain(x, w), rtol=1e-5, atol=1e-5)
    got, expected = (f(x, w) for f in results)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize(("K", "N"), SIDES)
@pytest.mark.parametrize(
    ("ours", "formula"),
    [(product, "BLK,KN->BLN"), (product, "EGCK,EKN->EGCN"), (tied_logits, "BTK,NK->BTN")],
)
def test_each_is_its_einsum(ours, formula, K, N):
    sizes = {"K": K, "N": N, "E": 3, "G": 2, "B": 2}
    shapes = [tuple(sizes.get(axis, 4) for axis in axes) for axes in re.split(",|->", formula)]
    plain = functools.partial(jnp.einsum, formula)
    assert_same_with_gradients(ours, plain, *drawn(*shapes))


@pytest.mark.parametrize(("K", "N"), SIDES)
def test_types_stay(K, N):
    x, w, direction = drawn((2, 4, K), (K, N), (2, 4, N), dtype=jnp.bfloat16)
    result, back = jax.vjp(product, x, w)
    assert {a.dtype for a in (result, *back(direction))} == {jnp.dtype(jnp.bfloat16)}


def test_tied_logits_of_bfloat16_are_not_rounded():
    x, w, direction = drawn((2, 4, 64), (40, 64), (2, 4, 40), dtype=jnp.bfloat16)
    result, back = jax.vjp(tied_logits, x, w)
    exact = np.einsum("BTM,VM->BTV", *(np.asarray(a, np.float64) for a in (x, w)))
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5)
    # Gradients have the type of what they are of.
    assert [a.dtype for a in back(direction.astype(jnp.float32))] == [jnp.bfloat16] * 2


# --- Precision, in lowered and compiled programs ----------------------------------


def assert_full(found: Sequence[Product], kind: str) -> None:
    """Asserts three products, forward and two gradients, of both routers and the logits."""
    router = [p for p in found if re.search(ROUTER, p.place)]
    logits = [p for p in found if re.search(LOGITS, p.place)]
    assert len(router) == 2 * 3
    assert len(logits) == 3
    assert all(p.full for p in [*router, *logits])
    assert {p.dtype for p in router} == {"f32"}
    assert {p.dtype for p in logits if "transpose" not in p.place} == {"f32"}
    # All others are as the platform likes, also in a float32 model.
    others = [p for p in found if p not in router and p not in logits]
    assert len(others) > 20
    assert not any(p.full for p in others), kind


def assert_full_loss(text: str) -> None:
    """Asserts that the softmax over the vocabulary, 101 pieces, is computed in float32."""
    softmax = re.findall(r" = (\w+)\[[\d,]*\b101\]\S* (?:exponential|subtract|divide)\(", text)
    assert softmax
    assert {*softmax} == {"f32"}


def assert_full_softmax_and_norms(text: str) -> None:
    """Asserts that every softmax and norm is computed in float32, in bfloat16 models too.

    Four heads' exponentials of [B, N, Q, R] = [4, 2, 32, 32] are among them: of the two layers of
    the encoder, and of both attentions of the decoder's.
    """
    softmax = re.findall(r" = (\w+)\[([\d,]*)\]\S* exponential\(", text)
    assert [shape for _, shape in softmax].count("4,2,32,32") == 2 + 2 * 2
    assert {dtype for dtype, _ in softmax} == {"f32"}
    # Two norms in each of two encoder layers, three in the decoder's, one behind each stack.
    norms = re.findall(r" = (\w+)\[[\d,]*\]\S* rsqrt\(", text)
    assert norms == ["f32"] * (2 * 2 + 2 * 3 + 2)


@pytest.mark.parametrize("kind", KINDS)
def test_router_and_logits_ask_for_full_precision(kind: str) -> None:
    function, arguments = gradient(kind)
    lowered = jax.jit(function).lower(*arguments)
    text = lowered.as_text("hlo", debug_info=True)
    assert_full(products(text), kind)
    assert_full_loss(text)
    assert_full_softmax_and_norms(text)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("machine", ["v5e:2x2", "h100:1x1", "cpu"])
def test_optimized_programs_keep_it(machine: str) -> None:
    if machine == "cpu":
        for kind in COMPILED:
            function, arguments = gradient(kind)
            text = jax.jit(function).lower(*arguments).compile().as_text() or ""
            assert_full(products(text), kind)
            assert_full_loss(text)
        return
    cuda = machine.startswith("h100")
    if cuda and not launch.CUDA_COMPILER.is_dir():
        pytest.skip("needs the compiler for GPUs: make pod-gpu")
    if not cuda and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu: make pod")
    paths = [str(Path(__file__).parents[2]), *([str(launch.CUDA_COMPILER)] if cuda else [])]
    environment = {**os.environ, **launch.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "tests.model.compiled_step", machine]
    with launch.one_at_a_time():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    texts = done.stdout.split("KIND ")[1:]
    assert [text.split("\n", 1)[0] for text in texts] == COMPILED
    for text, kind in zip(texts, COMPILED, strict=True):
        assert_full(products(text), kind)
        assert_full_loss(text)
