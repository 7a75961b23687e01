"""One trial and its verdict."""

from __future__ import annotations

import dataclasses

from tests.chaos.forks import Ended
from tests.chaos.world import World, differences, job

# In the order of the table, the worst last.
VERDICTS = {
    "survived": "the same command gives the undisturbed result",
    "named": "one line names what is damaged; what is whole stays as it is",
    "unnamed": "one line that does not name the file",
    "traceback": "a traceback",
    "hang": "it does not end",
    "lost": "work that was done is gone, or a process is left behind",
    "silent": "another result, and no word",
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """What was done to a run, and what came of it.

    Attributes:
        category, kind: the table's row and a part of it. detail: enough to see what was done.
        verdict: of VERDICTS. said: the last line, or what differs. state: from which it began.
    """

    category: str
    kind: str
    detail: str
    verdict: str
    said: str
    state: str = ""


def again(world: World, trial: Trial, name: str) -> Trial:
    """Runs the same job again; it must give the undisturbed result."""
    ended = job(name, world.run)
    verdict = bad_end(ended)
    if verdict is None and ended.status != 0:
        verdict = "lost"
    if verdict is not None:
        return dataclasses.replace(trial, verdict=verdict, said=said(ended))
    other = changed(world, name)
    verdict = "silent" if other else "survived"
    return dataclasses.replace(trial, verdict=verdict, said=", ".join(other[:4]))


def changed(world: World, name: str) -> list[str]:
    """What the job made other than in the undisturbed run."""
    return differences(world.found(name), world.expected(name))


def bad_end(ended: Ended) -> str | None:
    """What is wrong however the job's result is."""
    if ended.status is None:
        return "hang"
    if ended.orphans:
        return "lost"
    crashed = ended.status < 0
    return "traceback" if crashed or (ended.status != 0 and ended.traceback) else None


def said(ended: Ended) -> str:
    return f"status {ended.status}: {ended.last[:300]}"
