"""The table of all trials, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.trial import VERDICTS, Trial

HEADS = {
    "survived": "survived",
    "named": "named in one line",
    "unnamed": "one line, file not named",
    "traceback": "traceback",
    "hang": "hang",
    "lost": "lost",
    "silent": "silently wrong",
}


def table(trials: Sequence[Trial]) -> str:
    """A row a category, and their sum."""
    rows = [["", "tried", *HEADS.values()], ["---", *["---:"] * (1 + len(HEADS))]]
    categories = list(dict.fromkeys(trial.category for trial in trials))
    for category in [*categories, None]:
        of_it = [trial for trial in trials if category in (None, trial.category)]
        counts = [sum(trial.verdict == verdict for trial in of_it) for verdict in VERDICTS]
        rows.append([category or "all", *map(str, [len(of_it), *counts])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def kinds(trials: Sequence[Trial], category: str) -> str:
    """How many of a category's kinds were tried: "step 12, save 13"."""
    names = [trial.kind for trial in trials if trial.category == category]
    return ", ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names))


def not_held(trials: Sequence[Trial]) -> list[Trial]:
    """What is not to be: worst first."""
    order = list(VERDICTS)
    bad = [trial for trial in trials if trial.verdict not in ("survived", "named")]
    return sorted(bad, key=lambda trial: -order.index(trial.verdict))
