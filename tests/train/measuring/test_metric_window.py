"""A loss or a gradient that is not finite ends a run."""

import math

import jax.numpy as jnp
import pytest

from m4.train.measuring.metric_window import MetricWindow, NotFinite


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_ends_the_run(name: str, value: float) -> None:
    window = MetricWindow(["en-gl"], {})
    metrics = {"loss": jnp.asarray(2.0), "gradient_norm": jnp.asarray(0.5), "layers": {}}
    window.add(1, metrics)
    window.check()
    # Steps in flight are checked together: the first one is named.
    for step in (2, 3):
        window.add(step, metrics | {name: jnp.asarray(value)})
    with pytest.raises(NotFinite, match=rf"step 2: {name} is {value}; .*rsqrt.peak"):
        window.check()
