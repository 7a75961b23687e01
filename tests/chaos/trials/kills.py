"""kill -9 at a random moment of a chosen phase."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Sequence

from tests.chaos import phases
from tests.chaos.forks import Ended, in_child
from tests.chaos.phases import Event, Span
from tests.chaos.trial import Trial, again
from tests.chaos.world import AFTER, World, main

# Phase -> (the state it begins from, the job).
WHERE = {
    "cache building": ("nothing", "train"),
    "vocabulary": ("nothing", "train"),
    "compile": ("begun", "train"),
    "step": ("begun", "train"),
    "save": ("begun", "train"),
    "evaluate": ("begun", "train"),
    "restore": ("half", "train"),
    "baselines": ("finished", "baselines"),
    "decoding": ("finished", "decode"),
    "report": ("compared", "report"),
    "begin": ("nothing", "begin"),
    **{name: ("finished", name) for name in AFTER},
}


def recorded(world: World, name: str) -> tuple[Ended, list[Event]]:
    """A job in the run's folder, undisturbed, and its events."""
    return _watched(world, name, None)


def spans_of(world: World, phase: str) -> list[Span]:
    """The moments at which the phase can be met, measured once for each state and job."""
    state, name = WHERE[phase]
    if (state, name) not in world.spans:
        world.begin(state)
        ended, events = recorded(world, name)
        assert ended.status == 0, ended.err
        world.spans[state, name] = phases.spans(events)
    return [span for span in world.spans[state, name] if span.phase == phase]


def kill(world: World, phase: str, draw: random.Random) -> Trial:
    """Kills the job in the phase, runs it again and compares.

    The moment is drawn from the phase's spans of the undisturbed run. A job that ended before it is
    started over with half the time.
    """
    state, name = WHERE[phase]
    span = draw.choice(spans_of(world, phase))
    share = draw.random()
    for attempt in range(4):
        world.begin(state)
        after = span.seconds * share / 2**attempt
        ended, events = _watched(world, name, (span, after))
        if ended.status == -signal.SIGKILL:
            break
    met = events[-1] if events else None
    detail = f"{name}: {phase} {span.number + 1}, after {after:.3f} s"
    if met is not None and met.phase != phase:
        detail += f" (met {met.phase})"
    if ended.orphans:
        return Trial("kill -9", phase, detail, "lost", f"orphans: {ended.orphans}", state)
    return again(world, Trial("kill -9", phase, detail, "", "", state), name)


def _watched(
    world: World, name: str, moment: tuple[Span, float] | None
) -> tuple[Ended, list[Event]]:
    reader, writer = os.pipe()
    events: list[Event] = []

    def work() -> int:
        os.close(reader)
        phases.report_to(writer)
        return main(name, world.run)

    def watch(child: int, until: float) -> None:
        os.close(writer)
        deadline, rest = until, b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reader], [], [], left)[0]:
                break
            chunk = os.read(reader, 65536)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                events.append(phases.read(line))
                if moment is not None and deadline == until and _reached(events, moment[0]):
                    deadline = events[-1].time + moment[1]
        os.kill(child, signal.SIGKILL)

    try:
        return in_child(work, watch=watch), events
    finally:
        os.close(reader)


def _reached(events: Sequence[Event], span: Span) -> bool:
    last = events[-1]
    if not last.begins or last.phase != span.phase:
        return False
    return sum(event.begins and event.phase == span.phase for event in events) == span.number + 1
