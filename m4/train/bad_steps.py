"""Steps whose numbers go bad: a loss or a gradient that is not finite, or a spike; what they do."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from m4.settings import Between, InputError, OneOf, Size, checked
from m4.train.state import TrainState

Array = jax.Array
# What a step is judged by, in the order of the axis W of arrays here.
WATCHED = ("loss", "gradient_norm")
ACTIONS = ("stop", "skip")
# Their names in a guarded step's batch and metrics.
RECENT, BAD = "recent", "bad"
# Of a normal distribution the median absolute deviation is sigma / 1.4826. Where values hardly
# differ, a thousandth of the median is no spike.
_SIGMA, _LEAST = 1.4826, 1e-3


class BadStep(InputError):
    """A step that ends training: no checkpoint is of it or of a later one."""


@checked
@dataclasses.dataclass(frozen=True)
class BadSteps:
    """Which steps are bad, next to those whose loss or gradient norm is not finite.

    Attributes:
        spike_threshold: a value is a spike where its robust z-score, (value - median) / (1.4826
            MAD), is above this (MAD: the median absolute deviation; Iglewicz and Hoaglin 1993).
            None: spikes are not looked for.
        window: median and MAD are those of so many good steps before it; until there have been as
            many, no value is a spike.
        spikes_of: which values may be spikes.
        most_in_a_row: so many bad steps, without a good one between them, end training.
    """

    spike_threshold: Annotated[float, Between(0, 1e6, above=True)] | None = None
    window: Annotated[int, Between(4, 10_000)] = 128
    spikes_of: Sequence[Annotated[str, OneOf(WATCHED)]] = WATCHED
    most_in_a_row: Size = 10


DEFAULT = BadSteps()


def z_scores(values_W: Array, recent_NW: Array) -> Array:
    """Robust z-scores [W] of values against those of N steps; NaN where a step has not been yet."""
    median_W = jnp.median(recent_NW, axis=0)
    mad_W = jnp.median(jnp.abs(recent_NW - median_W[None]), axis=0)
    return (values_W - median_W) / jnp.maximum(_SIGMA * mad_W, _LEAST * jnp.abs(median_W))


def guarded(step: Callable[..., Any], rule: BadSteps) -> Callable[..., Any]:
    """The step, which leaves parameters and optimizer as they are where its numbers are bad.

    It decides from sums over all devices, so that all of them do the same. Its batch has under
    RECENT the values [N, W] of the last good steps; its metrics have them with its own, and under
    BAD whether the step is bad and its z-scores.
    """
    spikes_W = jnp.array([name in rule.spikes_of for name in WATCHED])

    def run(state: TrainState, batch: Mapping[str, Array]) -> tuple[TrainState, dict[str, Any]]:
        rest = dict(batch)
        recent_NW = rest.pop(RECENT)
        new, metrics = step(state, rest)
        values_W = jnp.stack([metrics[name] for name in WATCHED]).astype(jnp.float32)
        bad, z_W = ~jnp.all(jnp.isfinite(values_W)), jnp.zeros_like(values_W)
        if rule.spike_threshold is not None:
            z_W = z_scores(values_W, recent_NW)
            bad |= jnp.any(spikes_W & (z_W > rule.spike_threshold))
            later_NW = jnp.concatenate([recent_NW[1:], values_W[None]])
            recent_NW = jnp.where(bad, recent_NW, later_NW)

        kept = jax.tree.map(lambda old, made: jnp.where(bad, old, made), state, new)
        more = {RECENT: recent_NW, BAD: {"bad": bad, "z": z_W}}
        return dataclasses.replace(kept, step=new.step), {**metrics, **more}

    return run
