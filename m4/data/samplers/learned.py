"""Learned sampling: weights of directions follow measurements during training."""

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from m4.data.samplers import Planned, Sampler, normalized
from m4.data.samplers.temperature import temperature
from m4.settings import Between, InputError, SettingError, checked, configurable

State = dict[str, Any]  # JSON


class Signal(Protocol):
    """Function from measured numbers to rewards; a higher reward asks for more of a direction.

    `before` and `now` have the numbers of two evaluations by name, as in metrics.jsonl
    ("dev/nll/en-gl"). The result has the directions that the signal can judge. Rewards are centred
    and scaled, so only their order and proportions count.
    """

    def __call__(
        self, before: Mapping[str, float], now: Mapping[str, float]
    ) -> dict[str, float]: ...


_DEV, ALIGNMENT = "dev/nll/", "gradients/alignment/"


@configurable
def improvement(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Rewards the relative fall of a direction's dev loss: more of what is being learned.

    Source: loss-driven progress, Graves et al. 2017, "Automated Curriculum Learning for Neural
    Networks"; here it is on dev sets, and relative, since directions differ in difficulty.
    """
    return {
        name.removeprefix(_DEV): (before[name] - nll) / before[name]
        for name, nll in now.items()
        if name.startswith(_DEV) and before.get(name, 0.0) > 0
    }


@configurable
def loss(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Rewards the dev loss of a direction: more of what is still poor.

    Source: Sagawa et al. 2020, "Distributionally Robust Neural Networks", Algorithm 1: the same
    exponentiated ascent on the losses of groups.
    """
    return {k.removeprefix(_DEV): value for k, value in now.items() if k.startswith(_DEV)}


@configurable
def alignment(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Rewards the mean cosine of a direction's gradient with those of the other sets of directions.

    `Training.cosines` measures it, and names the sets.
    Source: Wang, Tsvetkov and Neubig 2020 (MultiDDS, arXiv 2004.06748), section 3: a language's
    reward is the cosine of its gradient and the dev gradients, averaged over languages. Here both
    gradients are of dev sentences, a set's own is left out (it would be 1), and weights follow by
    Hedge instead of by policy gradients.
    """
    named = now.items()
    return {k.removeprefix(ALIGNMENT): value for k, value in named if k.startswith(ALIGNMENT)}


# Prefixes of the names that the signals of this file read.
_READS: dict[Any, str] = {improvement: _DEV, loss: _DEV, alignment: ALIGNMENT}


@checked
@dataclasses.dataclass(frozen=True)
class Learned:
    """Exponentiated weights: after each evaluation w_d *= exp(step_size * reward_d).

    rates = (1 - floor) * w_d start_d / sum + floor * start_d, where `start` gives the initial
    rates. Rewards are centred (a direction that the signal does not know keeps its weight) and
    divided by the largest, so that step_size is the largest change of a weight's logarithm. All
    directions are
    measured each time, so nothing has to be explored: this is Hedge, not a bandit. Weights change
    only at evaluations, with the period of `Training.dev_period` or `Training.cosines`.

    Source: Hedge, Freund and Schapire 1997, section 2. The floor is the mixing of Exp3, Auer et al.
    2002, with `start` instead of the uniform distribution.

    Attributes:
        start: Sampler of the initial rates.
        signal: Function that rewards directions by measurements.
        step_size: Largest change of a weight's logarithm in one evaluation.
        floor: No rate falls below this share of its start.
    """

    start: Sampler = temperature
    signal: Signal = improvement
    step_size: Annotated[float, Between(0, 100, above=True)] = 0.2
    floor: Annotated[float, Between(0, 1, above=True)] = 0.25

    def __post_init__(self) -> None:
        if isinstance(self.start, Planned):
            raise SettingError("Learned.start", self.start, "a sampler without phases")

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]:
        """Returns the initial rates."""
        return self.start(sizes)

    def begin(self) -> State:
        """Returns the initial state, JSON that checkpoints keep."""
        return {"log_weights": {}, "measured": {}}

    @property
    def reads(self) -> str:
        """Prefix of the names that the signal reads; "" for a signal from another file."""
        return _READS.get(inspect.unwrap(self.signal), "")

    def update(self, state: State, measured: Mapping[str, float]) -> State:
        """Returns the state after an evaluation; the first one only sets the reference."""
        rewards = self.signal(state["measured"], measured)
        if bad := [name for name, reward in rewards.items() if not math.isfinite(reward)]:
            raise InputError(
                f"learned sampling: no finite reward for {', '.join(sorted(bad)[:5])}; training "
                "has diverged, or Learned.signal does not fit"
            )
        mean = sum(rewards.values()) / max(len(rewards), 1)
        most = max((abs(reward - mean) for reward in rewards.values()), default=0.0)
        log_weights = dict(state["log_weights"])
        for name, reward in rewards.items():
            moved = self.step_size * (reward - mean) / most if most else 0.0
            log_weights[name] = log_weights.get(name, 0.0) + moved
        # A number not measured this time is compared at its next measurement.
        return {"log_weights": log_weights, "measured": {**state["measured"], **measured}}

    def weights(self, state: State, directions: list[str]) -> dict[str, float]:
        """Returns directions' weights relative to the start; the largest is 1."""
        log_weights = {name: state["log_weights"].get(name, 0.0) for name in directions}
        largest = max(log_weights.values())
        return {name: math.exp(value - largest) for name, value in log_weights.items()}

    def rates(self, state: State, start: Mapping[str, float]) -> dict[str, float]:
        """Returns the present rates, given the initial ones."""
        weights = self.weights(state, list(start))
        learned = normalized({name: rate * weights[name] for name, rate in start.items()})
        return {n: (1 - self.floor) * learned[n] + self.floor * start[n] for n in start}
