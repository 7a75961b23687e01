"""Products of router and logits are in full float32 precision, in lowered and compiled programs."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from m4.plan import launch
from tests.model.compiled_step import COMPILED, KINDS, LOGITS, ROUTER, Product, gradient, products

ROOT = Path(__file__).parents[2]


def assert_full(found: Sequence[Product], kind: str) -> None:
    """The two routers and the logits have three products each: forward and two gradients."""
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
    """The softmax over the vocabulary, which has 101 pieces, is computed in float32."""
    softmax = re.findall(r" = (\w+)\[[\d,]*\b101\]\S* (?:exponential|subtract|divide)\(", text)
    assert softmax
    assert {*softmax} == {"f32"}


def assert_full_softmax_and_norms(text: str) -> None:
    """Every softmax and every norm is computed in float32, in bfloat16 models too.

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
    paths = [str(ROOT), *([str(launch.CUDA_COMPILER)] if cuda else [])]
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
