"""A figure of remedies against forgetting: what each run keeps, and what that costs the new."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from m4.eval.report.figures import LIGHT, SIZE, blank, style
from m4.eval.scoring.forgetting import Forgotten
from m4.eval.scoring.winners import Winner


def figure(new: Winner, forgotten: Mapping[str, Forgotten], metric: str) -> Figure:
    """Returns a point a run, with 95% intervals: the further right and up the better.

    Across is the mean change of the kept directions; up is how far the run is below the best
    system of all on the new languages.

    Args:
        new: The winner on average.
        forgotten: Run -> its summary.
        metric: Name of the metric.
    """
    drawn = blank(7.0, 4.2, layout="constrained")
    panel = drawn.subplots()
    style(panel)
    for number, (run, kept) in enumerate(forgotten.items()):
        lead, low, high = new.leads.get(run, (0.0, 0.0, 0.0))
        colour = LIGHT.series[number % len(LIGHT.series)]
        panel.errorbar(
            kept.mean, -lead, fmt="o", color=colour, markersize=6, elinewidth=1.4,
            xerr=[[max(kept.mean - kept.low, 0.0)], [max(kept.high - kept.mean, 0.0)]],
            yerr=[[max(high - lead, 0.0)], [max(lead - low, 0.0)]],
        )  # fmt: skip
        panel.annotate(run, (kept.mean, -lead), (6, 6), textcoords="offset points",
                       fontsize=0.95 * SIZE, color=LIGHT.ink)  # fmt: skip
    panel.axvline(0.0, color=LIGHT.bar, linewidth=0.9, linestyle=(0, (2, 3)))
    panel.set_xlabel(f"change of kept directions, {metric}", fontsize=SIZE, color=LIGHT.ink)
    panel.set_ylabel(f"below the best on new languages, {metric}", fontsize=SIZE, color=LIGHT.ink)
    return drawn
