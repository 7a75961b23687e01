"""What a run does about its bad steps (`m4.train.bad_steps`), and what it remembers of them."""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from m4.parallel import distributed
from m4.storage import remote
from m4.storage.files import read_json, write_text
from m4.train.bad_steps import BAD, RECENT, WATCHED, BadStep, guarded
from m4.train.training import Training

BAD_STEPS = "bad_steps.json"


class Rewind(Exception):
    """Training is to resume from the latest checkpoint: batches after it are left out now."""


def read_bad_steps(folder: Path) -> list[dict[str, Any]]:
    """The bad steps of a run in its folder, as they were found; InputError: the file is damaged."""
    try:
        return read_json(
            folder / BAD_STEPS, lambda found: [_checked(r) for r in found["bad_steps"]]
        )
    except FileNotFoundError:
        return []


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a bad step, if it is one; KeyError, TypeError: it is none."""
    texts, steps = (record["what"], record["action"]), (record["step"], *record.get("left_out", ()))
    if not all(isinstance(one, str) for one in texts):
        raise TypeError("what or action is no text")
    if not all(type(one) is int for one in steps):
        raise TypeError("a step is no number")
    return record


def left_out_by(records: Iterable[Mapping[str, Any]]) -> set[int]:
    """The steps whose batches these bad steps leave out."""
    return {step for one in records for step in one.get("left_out", ())}


class StepGuard:
    """Judges the steps of a run, after they have ended: all processes see the same numbers.

    With `Training.on_bad_step` = "stop" and no threshold of spikes the step is what it is without,
    and only what it returns is looked at.

    Attributes:
        left_out: the steps whose batches are not trained on.
    """

    def __init__(
        self,
        training: Training,
        folder: Path,
        saved: Mapping[str, Any],
        start: int,
        sharding: Sharding,
    ):
        """saved: the note of the checkpoint at step `start`. sharding: on all devices."""
        self._action, self._rule = training.on_bad_step, training.bad_steps
        self._folder, self._saved = folder, start
        self.on = self._action != "stop" or self._rule.spike_threshold is not None
        there = distributed.on_primary_then_broadcast("bad steps", lambda: read_bad_steps(folder))
        # Steps that were skipped after the checkpoint are found again; where training went back is
        # known from the file alone.
        again = [record for record in there if record["action"] == "rewind"]
        self._bad = {one["step"]: one for one in [*saved.get("bad_steps", []), *again]}
        self.left_out = left_out_by(self.bad)
        self._unchecked: list[tuple[int, dict[str, Any]]] = []
        if self.on:
            size = self._rule.window if self._rule.spike_threshold is not None else 0
            recent_NW = np.full((size, len(WATCHED)), np.nan, np.float32)
            if known := saved.get(RECENT, [])[-size:] if size else []:
                recent_NW[-len(known) :] = known
            # Not device_put, which compares processes' values, and NaN is not itself.
            self._recent = jax.make_array_from_callback(
                recent_NW.shape, sharding, lambda part: recent_NW[part]
            )

    @property
    def bad(self) -> list[dict[str, Any]]:
        """The bad steps of the run that are known."""
        return list(self._bad.values())

    def wrap(self, step: Any) -> Any:
        """The step to compile."""
        return guarded(step, self._rule) if self.on else step

    def inputs(self) -> dict[str, jax.Array]:
        """What the batch of a step has in addition."""
        return {RECENT: self._recent} if self.on else {}

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes a step's metrics, without reading them; what is not a row's is taken out."""
        judged: dict[str, Any] = {name: metrics[name] for name in WATCHED}
        if self.on:
            self._recent = metrics.pop(RECENT)
            judged |= metrics.pop(BAD)
        self._unchecked.append((step, judged))

    def check(self) -> list[int]:
        """Judges the steps since the last call; returns those that were skipped.

        Raises:
            BadStep: one of them ends training. Rewind: one of them is to be left out.
        """
        unchecked, self._unchecked = jax.device_get(self._unchecked), []
        found = []
        for step, judged in unchecked:
            if (record := self._record(step, judged)) is not None:
                found.append(step)
                self._act(record)
        return found

    def row(self, step: int) -> dict[str, float]:
        """For a row of metrics: how many steps up to this one were skipped or left out."""
        if not self.on:
            return {}
        return {"skipped_steps": sum(one <= step for one in {*self._bad} | self.left_out)}

    def note(self, step: int) -> dict[str, Any]:
        """For the checkpoint of a step; __init__ reads it."""
        self._saved = step
        if not self.on and not self._bad:
            return {}
        about: dict[str, Any] = {"bad_steps": self.bad}
        if self.on and len(self._recent):
            recent_NW = np.asarray(jax.device_get(self._recent))
            about[RECENT] = recent_NW[~np.isnan(recent_NW[:, 0])].tolist()
        return about

    def _record(self, step: int, judged: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is bad of a step; None: nothing."""
        for name in WATCHED:
            if not math.isfinite(value := float(judged[name])):
                return {"step": step, "what": f"{name} is {value}", "action": self._action}
        if not judged.get("bad", False):
            return None
        highest = max((float(z), name) for z, name in zip(judged["z"], WATCHED, strict=True)
                      if name in self._rule.spikes_of)  # fmt: skip
        z, name = highest
        what = f"{name} is {float(judged[name]):.6g}, a spike: {z:.1f} robust standard deviations "
        what += f"above the median of {self._rule.window} steps"
        return {"step": step, "what": what, "action": self._action}

    def _act(self, record: dict[str, Any]) -> None:
        step, action = record["step"], self._action
        if action == "rewind":
            first = max(step - self._rule.leave_out, self._saved) + 1
            record["left_out"] = list(range(first, step + 1))
            self.left_out |= {*record["left_out"]}
        self._bad[step] = record
        self._write()
        if action == "stop":
            raise BadStep(self._said(record))
        if (row := self._in_a_row(step)) >= self._rule.most_in_a_row:
            raise BadStep(
                f"{row} bad steps in a row (BadSteps.most_in_a_row): {self._said(record)}"
            )
        if distributed.is_primary():
            done = "skipped" if action == "skip" else "training goes back to the latest checkpoint"
            print(f"step {step}: {record['what']}: {done}", flush=True)
        if action == "rewind":
            raise Rewind

    def _in_a_row(self, step: int) -> int:
        """Bad steps up to this one without a good one between them."""
        row = 0
        while step in self._bad or step in self.left_out:
            row += step in self._bad
            step -= 1
        return row

    def _write(self) -> None:
        if distributed.is_primary():
            records: Collection[Any] = [self._bad[step] for step in sorted(self._bad)]
            write_text(self._folder / BAD_STEPS, json.dumps({"bad_steps": records}, indent=1))
            if self._action != "skip":
                remote.push(self._folder)

    def _said(self, record: Mapping[str, Any]) -> str:
        step = record["step"]
        text = f"step {step}: {record['what']}; no checkpoint has its numbers. "
        if (self._folder / "run.json").is_file():
            text += f"m4 explain {remote.shown(self._folder)} --step={step} shows its pairs. "
        return text + (
            "The learning rate may be too high or its warmup too short (where nothing else is set, "
            "rsqrt.peak and rsqrt.warmup_steps)"
        )
