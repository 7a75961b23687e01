"""How far the bilingual models are, and how long they will take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import jax

from m4.experiment import Experiment
from m4.plan.flops import forward_flops, model_flops
from m4.plan.peaks import peak_flops
from m4.plan.program import planned_model

# The share of the peak that small models reach: on CPU cores in the README's demo, else a guess.
SHARES = {"cpu": 0.35, "accelerator": 0.02}
# Of the steps that a model may take at most, the share after which dev ended it, by experience:
# what is expected before a model of its level has ended.
TRAINED = 0.5


def step_flops(experiment: Experiment) -> int:
    """FLOPs of a training step's matrix products, forward and backward."""
    model, _ = planned_model(experiment, 1)
    lengths = experiment.data.corpus.lengths
    rows = experiment.training.batch_size
    return model_flops(forward_flops(model, rows, lengths["inputs"], lengths["targets"]))


def rate(platform: str) -> float:
    """FLOPs a second that training small models reaches on this process's devices."""
    share = SHARES["cpu" if platform == "cpu" else "accelerator"]
    return share * peak_flops(jax.devices(platform), "float32")


class Progress:
    """What each model has done, and what is expected of those that have not ended.

    Steps of different levels take different times, so the time left is that of the work left, in
    FLOPs. A model that has not ended is expected to take as many of its steps as those of its level
    did: their median share.

    Args:
        steps: at most, of the models to train, by language. flops: of a step, by level. levels:
            every language's. ended: the share of its steps that a model took which has ended
            before, by language; one of `steps` among them has only its test set to translate.
    """

    def __init__(
        self,
        steps: Mapping[str, int],
        flops: Mapping[str, int],
        levels: Mapping[str, str],
        ended: Mapping[str, float],
    ) -> None:
        self.steps = dict(steps)
        self._flops = {name: flops[levels[name]] for name in steps}
        self._levels, self._ended = levels, dict(ended)
        self._done = dict.fromkeys(steps, 0)
        self._before: dict[str, int] = {}
        self._texts: dict[str, str] = {}
        self._complete: set[str] = set()
        self._start = time.monotonic()
        for name in steps.keys() & ended.keys():
            step = round(ended[name] * steps[name])
            self.heard(name, step, "")
            self.finished(name, step)

    def to_train(self) -> tuple[int, int, int]:
        """(models, steps that are expected, steps at most) of those that have not ended."""
        left = [name for name in self.steps if name not in self._complete]
        expected = sum(map(self.expected, left))
        return len(left), round(expected), sum(self.steps[name] for name in left)

    def heard(self, name: str, step: int, text: str) -> None:
        """A model is at a step."""
        if name not in self._complete:
            self._before.setdefault(name, step)  # resumed there: not the work of this process
            self._done[name], self._texts[name] = step, f"{name} {text}"

    def finished(self, name: str, step: int) -> None:
        """A model has ended at a step."""
        self._complete.add(name)
        self._before.setdefault(name, 0)
        self._done[name] = step
        self._ended[name] = step / self.steps[name]
        self._texts.pop(name, None)

    def expected(self, name: str) -> float:
        """Steps of a model when it ends."""
        if name in self._complete:
            return self._done[name]
        level = self._levels[name]
        alike = [share for of, share in self._ended.items() if self._levels[of] == level]
        share = statistics.median(alike or self._ended.values() or [TRAINED])
        return max(share * self.steps[name], self._done[name])

    def flops_left(self) -> float:
        """Of the training that is left."""
        left = {name: self.expected(name) - self._done[name] for name in self.steps}
        return sum(steps * self._flops[name] for name, steps in left.items())

    def seconds_left(self) -> float | None:
        """At the rate so far; None: nothing is done."""
        worked = sum(
            (self._done[name] - before) * self._flops[name] for name, before in self._before.items()
        )
        if not worked:
            return None
        return self.flops_left() * (time.monotonic() - self._start) / worked

    def line(self) -> tuple[int, str, int, float | None]:
        """(steps done, text, steps expected in all, seconds left)."""
        total = sum(self.expected(name) for name in self.steps)
        models = f"{len(self._complete)}/{len(self.steps)} models"
        text = " · ".join([models, *self._texts.values()])
        return sum(self._done.values()), text, round(total), self.seconds_left()
