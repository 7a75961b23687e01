"""The examples run, and show what they say."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from m4.parallel.sharding import replicate, split
from m4.plan.hlo import summary

FOLDER = Path(__file__).parents[1] / "examples"


def example(name: str, folder: Path = FOLDER) -> ModuleType:
    """The program of that name, as a module."""
    spec = importlib.util.spec_from_file_location(f"examples.{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_split_by_annotated_arguments_equals_one_device() -> None:
    spatial = example("spatial_partitioning")
    images = jax.random.normal(jax.random.key(0), (1, 16, 4, 4, 2))
    kernels = spatial.make_kernels(channels=2)
    expected = spatial.network(images, kernels)
    result, sent = spatial.run(spatial.network, split(images, 1, 8), replicate_all(kernels))
    np.testing.assert_allclose(result, expected, atol=1e-6)
    # It stays split: two of sixteen layers on each device.
    assert result.sharding.shard_shape(result.shape) == (1, 2, 4, 4, 2)
    # Three convolutions with a halo from either side, one of stride 2 with one from the right.
    assert {kind: total.count for kind, total in summary(sent).items()} == {
        "collective-permute": 3 * 2 + 1
    }
    # Neighbours alone: 0 -> 1 ... 6 -> 7, or the other way.
    for each in sent:
        steps = {target - source for source, target in each.groups}
        assert len(each.groups) == 7
        assert steps in ({1}, {-1})
    # One layer of 4 x 4 x 2 float32 (128 bytes) from either side at "in", with twice the channels
    # at "out", from one side at "down", and of 2 x 2 x 2 (32) from either side at "middle".
    assert sorted(each.operand_bytes for each in sent) == [32, 32, 128, 128, 128, 256, 256]


def test_gradients_send_halos_and_are_summed() -> None:
    spatial = example("spatial_partitioning")
    images = jax.random.normal(jax.random.key(0), (1, 16, 4, 4, 2))
    kernels = spatial.make_kernels(channels=2)
    expected = jax.jit(jax.grad(spatial.loss))(kernels, images)
    everywhere = replicate_all(kernels)
    result, sent = spatial.run(jax.grad(spatial.loss), everywhere, split(images, 1, 8))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6),
        result,
        expected,
    )
    totals = summary(sent)
    assert set(totals) == {"all-reduce", "collective-permute"}
    # The gradients of all kernels: 27 places, 2 + 2 + 2 + 4 channels in, 2 out, float32.
    assert totals["all-reduce"].operand_bytes == 27 * (2 + 2 + 2 + 4) * 2 * 4


def replicate_all(kernels: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: replicate(kernel) for name, kernel in kernels.items()}


@pytest.mark.slow  # seqio's import
@pytest.mark.filterwarnings("default")
def test_tasks_of_tfds_are_registered_by_name() -> None:
    tf, seqio = importlib.import_module("tensorflow"), importlib.import_module("seqio")
    wmt = example("wmt_tasks")
    assert [task.name for task in seqio.get_mixture_or_task("wmt16").tasks] == [
        "wmt16_de_en",
        "wmt16_en_ro",
    ]
    given = tf.data.Dataset.from_tensors({"de": "Guten Tag", "en": "Good day"})
    (pair,) = wmt.translate(given, "de", "en").as_numpy_iterator()
    assert pair == {"inputs": b"translate de to en: Guten Tag", "targets": b"Good day"}
