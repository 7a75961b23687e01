"""Counts of steps are added up on the devices."""

import gc

import jax
import jax.numpy as jnp
import numpy as np

from m4.train.measuring.counters import DeviceSum


def test_one_array_whatever_the_number_of_steps() -> None:
    shape, total = (3, 17), DeviceSum(most=100)
    for step in range(6):
        total.add({"encoder_0": jnp.full(shape, step, jnp.int32)})
    gc.collect()
    assert sum(x.shape == shape for x in jax.live_arrays()) == 1
    np.testing.assert_array_equal(total.take()["encoder_0"], np.full(shape, 15))
    assert total.take() is None


def test_sums_that_int32_cannot_hold_are_exact() -> None:
    total = DeviceSum(most=2**30)
    for _ in range(5):
        total.add(jnp.asarray([2**30], jnp.int32))
    assert total.take().tolist() == [5 * 2**30]
