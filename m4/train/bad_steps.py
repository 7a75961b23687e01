"""Bad steps, whose loss or gradient is not finite or a spike: they are skipped or end the run."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from m4.parallel import distributed
from m4.settings import Between, InputError, Size, checked
from m4.train.step import TrainState

Array = jax.Array
# Numbers by which a step is judged, in the order of the axis W.
WATCHED = ("loss", "gradient_norm")
ACTIONS = ("stop", "skip")
# Their names in a guarded step's batch and metrics.
RECENT, BAD = "recent", "bad"
# The median absolute deviation of a normal distribution is sigma / 1.4826. If values hardly
# differ, a thousandth of the median is not a spike.
_SIGMA, _LEAST = 1.4826, 1e-3


class BadStep(InputError):
    """A bad step that ends training; no checkpoint is of it or of a later one."""


@checked
@dataclasses.dataclass(frozen=True)
class BadSteps:
    """Rules for bad steps, besides those whose loss or gradient norm is not finite.

    Attributes:
        spike_threshold: A value is a spike if its robust z-score, (value - median) / (1.4826 MAD),
            exceeds this (MAD: median absolute deviation; Iglewicz and Hoaglin 1993). Defaults to
            no spikes.
        window: Number of good steps before it over which median and MAD are taken. Before that
            many, no value is a spike.
        most_in_a_row: Number of consecutive bad steps that end training.
    """

    spike_threshold: Annotated[float, Between(0, 1e6, above=True)] | None = None
    window: Annotated[int, Between(4, 10_000)] = 128
    most_in_a_row: Size = 10


DEFAULT = BadSteps()


def z_scores(values_W: Array, recent_NW: Array) -> Array:
    """Returns robust z-scores [W] of values against N steps, with NaN for missing steps."""
    median_W = jnp.median(recent_NW, axis=0)
    mad_W = jnp.median(jnp.abs(recent_NW - median_W[None]), axis=0)
    return (values_W - median_W) / jnp.maximum(_SIGMA * mad_W, _LEAST * jnp.abs(median_W))


def guarded(step: Callable[..., Any], rule: BadSteps) -> Callable[..., Any]:
    """Returns the step so that it keeps parameters and optimizer if its numbers are bad.

    All devices decide alike. The batch has the values [N, W] of the last good steps under RECENT;
    the metrics have them with the step's own, and under BAD whether it is bad and its z-scores.
    """

    def run(state: TrainState, batch: Mapping[str, Array]) -> tuple[TrainState, dict[str, Any]]:
        rest = dict(batch)
        recent_NW = rest.pop(RECENT)
        new, metrics = step(state, rest)
        values_W = jnp.stack([metrics[name] for name in WATCHED]).astype(jnp.float32)
        bad, z_W = ~jnp.all(jnp.isfinite(values_W)), jnp.zeros_like(values_W)
        if rule.spike_threshold is not None:
            z_W = z_scores(values_W, recent_NW)
            bad |= jnp.any(z_W > rule.spike_threshold)
            later_NW = jnp.concatenate([recent_NW[1:], values_W[None]])
            recent_NW = jnp.where(bad, recent_NW, later_NW)

        kept = jax.tree.map(lambda old, made: jnp.where(bad, old, made), state, new)
        more = {RECENT: recent_NW, BAD: {"bad": bad, "z": z_W}}
        return dataclasses.replace(kept, step=new.step), {**metrics, **more}

    return run


@dataclasses.dataclass
class StepGuard:
    """Judges the steps of a run after they have ended, on the same numbers in all processes.

    With the `action` "stop" and no threshold of spikes, the compiled step has no guard, and only
    its metrics are checked. `saved` is the note of the checkpoint that the run continues from, or
    {}. `sharding`, for the window of recent values, is replicated over all devices.
    """

    action: str
    rule: BadSteps
    saved: dataclasses.InitVar[Mapping[str, Any]]
    sharding: dataclasses.InitVar[Sharding]

    def __post_init__(self, saved: Mapping[str, Any], sharding: Sharding) -> None:
        spikes = self.rule.spike_threshold is not None
        self.on = self.action != "stop" or spikes
        self._bad: dict[int, Any] = {one["step"]: one for one in saved.get("bad_steps", [])}
        self._unchecked: list[tuple[int, dict[str, Any]]] = []
        if self.on:
            size = self.rule.window if spikes else 0
            recent_NW = np.full((size, len(WATCHED)), np.nan, np.float32)
            if known := saved.get(RECENT, [])[-size:] if size else []:
                recent_NW[-len(known) :] = known
            # Not device_put, which compares the processes' values, as NaN does not equal itself.
            self._recent = jax.make_array_from_callback(
                recent_NW.shape, sharding, lambda part: recent_NW[part]
            )

    def wrap(self, step: Any) -> Any:
        return guarded(step, self.rule) if self.on else step

    def inputs(self) -> dict[str, jax.Array]:
        """Returns the additional arrays in a guarded step's batch."""
        return {RECENT: self._recent} if self.on else {}

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Stores the metrics of a step without reading them, and removes the guard's own."""
        judged: dict[str, Any] = {name: metrics[name] for name in WATCHED}
        if self.on:
            self._recent = metrics.pop(RECENT)
            judged |= metrics.pop(BAD)
        self._unchecked.append((step, judged))

    def check(self) -> list[int]:
        """Returns the steps skipped since the last call. Raises BadStep if one ends training."""
        unchecked, self._unchecked = jax.device_get(self._unchecked), []
        skipped = []
        for step, judged in unchecked:
            if (what := self._problem(judged)) is not None:
                self._act(step, what)
                skipped.append(step)
        return skipped

    def row(self, step: int) -> dict[str, float]:
        return {"skipped_steps": sum(one <= step for one in self._bad)} if self.on else {}

    def note(self) -> dict[str, Any]:
        if not self.on and not self._bad:
            return {}
        about: dict[str, Any] = {"bad_steps": [*self._bad.values()]}
        if self.on and len(self._recent):
            recent_NW = np.asarray(jax.device_get(self._recent))
            about[RECENT] = recent_NW[~np.isnan(recent_NW[:, 0])].tolist()
        return about

    def _problem(self, judged: Mapping[str, Any]) -> str | None:
        """Describes why a step is bad, or returns None for a good one."""
        for name in WATCHED:
            if not math.isfinite(value := float(judged[name])):
                return f"{name} is {value}"
        if not judged.get("bad", False):
            return None
        z, name = max(zip(map(float, judged["z"]), WATCHED, strict=True))
        return (
            f"{name} is {float(judged[name]):.6g}, a spike: {z:.1f} robust standard deviations "
            f"above the median of {self.rule.window} steps"
        )

    def _act(self, step: int, what: str) -> None:
        said = (
            f"step {step}: {what}; no checkpoint has its numbers. The command data batch with "
            f"--step={step} prints its pairs. The learning rate may be too high or its warmup too "
            "short (where nothing else is set, rsqrt.peak and rsqrt.warmup_steps)"
        )
        if self.action == "stop":
            raise BadStep(said)
        self._bad[step] = {"step": step, "what": what}
        row = 1
        while step - row in self._bad:
            row += 1
        if row >= self.rule.most_in_a_row:
            raise BadStep(f"{row} bad steps in a row (BadSteps.most_in_a_row): {said}")
        if distributed.is_primary():
            print(f"step {step}: {what}; skipped", flush=True)
