"""The machine's clock set back: before the job, or in the middle of it."""

from __future__ import annotations

import os
import random
import time

from tests.chaos.forks import in_child
from tests.chaos.trial import Trial, bad_end, changed, said
from tests.chaos.world import AFTER, World, main

DAY = 86_400.0
JOBS = {"train": "half", "decode": "finished", "report": "compared"}
JOBS |= dict.fromkeys(AFTER, "finished")


def set_back(world: World, job_name: str, draw: random.Random) -> Trial:
    """The clock jumps back at its n-th reading, and all files are of the future."""
    state = JOBS[job_name]
    world.begin(state)
    seconds = draw.choice([1.0, 3600.0, DAY, 3650 * DAY]) * draw.uniform(1, 2)
    reading = draw.choice([0, 0, draw.randrange(1, 200)])
    future = time.time() + draw.choice([60.0, DAY])
    for path in world.run.rglob("*"):
        os.utime(path, (future, future))

    def work() -> int:
        true, count = time.time, 0

        def wrong() -> float:
            nonlocal count
            count += 1
            return true() - (seconds if count > reading else 0)

        time.time = wrong
        return main(job_name, world.run)

    ended = in_child(work)
    detail = f"{job_name}: {seconds:.0f} s back at reading {reading}, files of the future"
    trial = Trial("clock set back", job_name, detail, "", said(ended), state)
    verdict = bad_end(ended) or ("lost" if ended.status else None)
    if verdict is None:
        other = changed(world, job_name)
        verdict = "silent" if other else "survived"
        text = ", ".join(other[:4])
    else:
        text = said(ended)
    return Trial(trial.category, job_name, detail, verdict, text, state)
