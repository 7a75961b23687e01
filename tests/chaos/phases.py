"""When a job enters which phase: reported from within the child, through hooks that tests set."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

# Phase -> the functions whose call is its beginning and whose return its end. Steps, compiling and
# evaluating come from the trainer's own clock.
FUNCTIONS = {
    "cache building": ("m4.data.cache.build:write_text", "m4.data.cache.build:tokenize"),
    "vocabulary": ("m4.data.vocabulary.vocabulary:train",),
    "restore": ("m4.storage.checkpoints:Checkpoints.restore",),
    "save": ("m4.storage.checkpoints:Checkpoints.save", "m4.storage.checkpoints:Checkpoints.wait"),
    "decoding": ("m4.jobs.decoding.testsets:decode_to_files",),
    "report": ("m4.jobs.decoding.report:write_results",),
    "baselines": ("m4.jobs.bilingual.baselines:train_one",),
    "begin": (
        "m4.jobs.checkpoints.initial:Beginning.report",
        "m4.jobs.checkpoints.initial:Beginning.state",
    ),
    "score": ("m4.jobs.decoding.score:decode_to_files",),
    "text": ("m4.jobs.decoding.text:_translate",),
    "average": ("m4.jobs.checkpoints.average:mean",),
}
# A save continues in other threads after its call.
_LEAST_SECONDS = {"save": 0.4}


class Event(NamedTuple):
    """At `time` (time.monotonic) a phase begins or ends."""

    time: float
    phase: str
    begins: bool


class Span(NamedTuple):
    """The `number`-th time (from 0) of a phase, and how long it lasts."""

    phase: str
    number: int
    seconds: float


def report_to(pipe: int) -> None:
    """Sets the hooks in this process: every event is a line in a pipe."""

    def say(phase: str, begins: bool) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, f"{time.monotonic()} {int(begins)} {phase}\n".encode())

    for phase, names in FUNCTIONS.items():
        for name in names:
            _hook(name, functools.partial(say, phase))
    _hook_clock(say)


def _hook(name: str, say: Callable[[bool], None]) -> None:
    module, _, attribute = name.partition(":")
    owner = importlib.import_module(module)
    *within, last = attribute.split(".")
    for part in within:
        owner = getattr(owner, part)
    function = getattr(owner, last)

    @functools.wraps(function)
    def hooked(*arguments: Any, **named: Any) -> Any:
        say(True)
        try:
            return function(*arguments, **named)
        finally:
            say(False)

    setattr(owner, last, hooked)


def _hook_clock(say: Callable[[str, bool], None]) -> None:
    from m4.train.measuring.step_clock import StepClock

    pause, waiting = StepClock.pause, StepClock.waiting

    @contextlib.contextmanager
    def paused(clock: StepClock, phase: str) -> Iterator[None]:
        say(phase, True)
        with pause(clock, phase):
            yield
        say(phase, False)

    def awaited(clock: StepClock, step: int) -> contextlib.AbstractContextManager[None]:
        say("step", True)
        return waiting(clock, step)

    mock.patch.multiple(StepClock, pause=paused, waiting=awaited).start()


def read(line: bytes) -> Event:
    when, begins, phase = line.decode().split(" ", 2)
    return Event(float(when), phase.strip(), begins == "1")


def spans(events: list[Event]) -> list[Span]:
    """All times of all phases: each lasts until its own end, a step until the next event."""
    found: list[Span] = []
    for position, event in enumerate(events):
        if not event.begins:
            continue
        later = events[position + 1 :]
        its_end = (event.phase, False)
        ends = [e.time for e in later if event.phase == "step" or (e.phase, e.begins) == its_end]
        seconds = (ends[0] if ends else event.time) - event.time
        number = sum(span.phase == event.phase for span in found)
        least = _LEAST_SECONDS.get(event.phase, 0.02)
        found.append(Span(event.phase, number, max(seconds, least)))
    return found
