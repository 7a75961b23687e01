"""Learning-rate schedules: functions of the total number of steps that return step -> rate."""

from typing import Annotated

import jax.numpy as jnp
import optax

from m4.settings import Between, Steps, checked

Schedule = optax.Schedule


@checked
def rsqrt(
    total_steps: Steps, *, peak: Annotated[float, Between(0, 1000, above=True)] = 0.01,
    hold_steps: Steps | None = 10_000, warmup_steps: Steps = 0, cooldown_steps: Steps = 0,
) -> Schedule:  # fmt: skip
    """Returns the inverse square root: the peak, then peak * sqrt(hold_steps / step).

    The defaults are GShard's (arXiv 2006.16668, A.2: "1.0 with square-root decay after 10k steps",
    which is 1.0 / sqrt(max(step, 10000)), so 0.01 at first).

    Args:
        total_steps: Step at which the cooldown ends.
        peak: Highest rate.
        hold_steps: Step at which the decay begins, or the end of the warm-up if that is later; None
            means no decay, however long the run.
        warmup_steps: Length of a linear rise from 0 (the paper has none; Adam needs one).
        cooldown_steps: Length of a linear fall to 0 at the end. Short runs gain much by it or by
            `m4.train.average`, which need not know the end.
    """

    def schedule(step):
        t = step + 1.0
        rate = peak * jnp.ones_like(t)
        if hold_steps is not None:
            hold = float(max(hold_steps, warmup_steps, 1))
            rate = peak * jnp.sqrt(hold / jnp.maximum(t, hold))
        if warmup_steps:
            rate = rate * jnp.minimum(1.0, t / warmup_steps)
        if cooldown_steps:
            left = (total_steps - step) / cooldown_steps
            rate = rate * jnp.clip(left, 0.0, 1.0)
        return rate

    return schedule
