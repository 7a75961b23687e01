"""A thread that watches a training run.

It writes a heartbeat to disk, and reports a step, an evaluation or a checkpoint that stalls.
"""

import contextlib
import dataclasses
import faulthandler
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from etils import epath

from m4.parallel import distributed
from m4.settings import InputError
from m4.storage.files import read_json, write_text
from m4.storage.records import count, number, record, text
from m4.train.measuring.step_clock import StepClock

HEARTBEAT = "heartbeat.json"
STALLS = "stalls"
_OF_A_STEP = ("step", "data")
# Seconds between two heartbeats.
PERIOD_SECONDS = 10.0
# Seconds without one after which a job gives no sign of life. Uploads to a store are every 30 s.
SILENT_SECONDS = 120.0
# A step stalls when it takes longer than both: this many seconds (an unreachable file server stops
# a stream for a minute or two), and this many typical steps.
STALL_SECONDS = 300.0
STALL_STEPS = 10
# Evaluating and saving stall when they take longer than both STALL_SECONDS and ten times the
# longest so far; the first time, which also compiles, when longer than this. Compilations have no
# limit.
FIRST_SECONDS = 1800.0
_PAUSES = ("evaluate", "save")
# Phases of a job that has finished training, and of one that a signal or an error has ended.
ENDS = ("end", "interrupted")
_BEAT = record({"step": count, "phase": text, "time": number, "started": number})


class Heartbeat(NamedTuple):
    """The content of heartbeat.json."""

    step: int
    phase: str
    # Times (`time.time`) of writing it, and of the run's first start.
    time: float
    started: float

    def silent(self, now: float) -> bool:
        """Returns True if a job has not ended and gives no sign of life; now is a `time.time`."""
        return self.phase not in ENDS and now - self.time > SILENT_SECONDS

    def ended(self, now: float) -> bool:
        """Returns True if the job has ended, or gives no sign of life."""
        return self.phase in ENDS or self.silent(now)


def heartbeat(folder: Path | epath.Path) -> Heartbeat | None:
    """Returns the last heartbeat in a run's folder, or None. Raises ValueError if damaged."""
    with contextlib.suppress(FileNotFoundError):
        return read_json(folder / HEARTBEAT, _BEAT, lambda said: Heartbeat(**said))
    return None


def first_start(folder: Path) -> float:
    """Returns the time (`time.time`) of the first start in this folder, by default now."""
    try:
        found = heartbeat(folder)
    except InputError as error:
        print(f"{error}; goodput counts from now", file=sys.stderr)
        found = None
    return time.time() if found is None else found.started


@contextlib.contextmanager
def watched(clock: StepClock, folder: Path, started: float) -> Iterator[None]:
    """Context in which the run in `folder` has a heartbeat, and stalls are reported.

    The primary process rewrites folder/heartbeat.json every ten seconds, but not during a stall.
    Each process reports each of its stalls once, with the stacks of its threads, on stderr and in
    folder/stalls.
    """
    ended = threading.Event()
    watchdog = _Watchdog(clock, folder, started)
    thread = threading.Thread(target=watchdog.run, args=(ended,), name="watchdog", daemon=True)
    watchdog.beat("start")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        watchdog.beat(ENDS[sys.exception() is not None])


@dataclasses.dataclass
class _Watchdog:
    clock: StepClock
    folder: Path
    started: float
    reported: float | None = None  # start of the last reported stall

    def run(self, ended: threading.Event) -> None:
        while not ended.wait(PERIOD_SECONDS):
            stalled = self._stalled()
            if stalled is None:
                self.beat(self.clock.phase)
            elif self.reported != stalled:
                self.reported = stalled
                self._report(time.monotonic() - stalled)

    def beat(self, phase: str) -> None:
        if not distributed.is_primary():
            return
        now = Heartbeat(self.clock.step, phase, time.time(), self.started)
        try:
            write_text(self.folder / HEARTBEAT, json.dumps(now._asdict()))
        except OSError as error:  # a full disk stops training only when it must write
            print(f"no heartbeat: {error}", file=sys.stderr)

    def _stalled(self) -> float | None:
        """Returns the start of a stall, or None."""
        since, phase = self.clock.since, self.clock.phase
        if phase not in (*_OF_A_STEP, *_PAUSES):
            return None
        usual = self.clock.typical_seconds
        if phase in _PAUSES:
            usual = self.clock.longest.get(phase)
        limit = FIRST_SECONDS if usual is None else max(STALL_SECONDS, STALL_STEPS * usual)
        return since if time.monotonic() - since > limit else None

    def _report(self, seconds: float) -> None:
        clock, process = self.clock, jax.process_index()
        phase = clock.phase
        what = f"step {clock.step}" if phase in _OF_A_STEP else f"{phase} at step {clock.step}"
        text = (
            f"{what} has been running for {seconds:.0f} s "
            f"(phase {phase}, process {process}; a step takes {clock.typical_seconds:.3g} s)"
        )
        path = self.folder / STALLS / f"step_{clock.step}.process_{process}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                print(text, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            print(f"{path.read_text(encoding='utf-8')}({path})", file=sys.stderr, flush=True)
        except OSError as error:
            print(f"{text}; its stacks cannot be written: {error}", file=sys.stderr, flush=True)
