"""The picture and the page of `m4 data preview`: how often each language would be seen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from m4 import html as pages
from m4.data.inspection.preview import Column, Preview, repeated_more_than, short, times
from m4.data.languages import describe
from m4.eval.report.figures import LIGHT, Sheet, inline, legend, save
from m4.storage.files import write_text

TEMPLATE = Path(__file__).with_name("preview.html.j2")
_MARKERS = ("o", "^", "D", "v", "P", "X")
# From faint to strong through one hue, evenly in lightness, legible on light and dark paper.
_SHADES = LinearSegmentedColormap.from_list("temperatures", ["#9fcdec", "#5aa3d8", "#2b78b8"])


def write(preview: Preview, most_epochs: float, folder: Path) -> list[Path]:
    """Writes data_preview.html, .png and .pdf to the folder, and returns their paths."""
    page = folder / "data_preview.html"
    drawn = figure(preview, most_epochs)
    pictures = [folder / f"data_preview{suffix}" for suffix in (".png", ".pdf")]
    save(drawn, pictures)
    write_text(page, html(preview, most_epochs, drawn))
    return [page, *pictures]


def figure(preview: Preview, most_epochs: float) -> Figure:
    """Returns epochs and shares of each sampler over languages by falling training pairs.

    Above are the epochs with the bound, then the shares, below the pairs, all on log scales.
    Languages are labelled with their codes, which every font has.
    """
    codes = list(preview.pairs)
    sheet = Sheet.make(codes, [1, 1, 0.3], 7.2)
    panels, size = sheet.panels, sheet.size
    usable = [one for one in preview.columns if one.drawn]
    for panel in panels[:2]:
        panel.set_yscale("log")
    epochs = [[one.drawn[code].epochs for code in codes] for one in usable]
    shares = [[100 * preview.share(one.drawn[code]) for code in codes] for one in usable]
    for panel, values in zip(panels, (epochs, shares), strict=False):
        _lines(sheet, panel, usable, values)
    panels[0].set_ylabel(f"epochs in {short(preview.total_steps)} steps", fontsize=size,
                         color=LIGHT.ink)  # fmt: skip
    unit = "pairs" if preview.sample_by == "examples" else "tokens"
    panels[1].set_ylabel(f"share of {unit}, %", fontsize=size, color=LIGHT.ink)
    for bound, text in ((1.0, ""), (most_epochs, f"{most_epochs:g} times")):
        panels[0].axhline(bound, color=LIGHT.ink, linewidth=1.0, zorder=2,
                          linestyle=(0, (4, 3)) if text else "-")  # fmt: skip
        panels[0].annotate(text, (0.01, bound), xycoords=("axes fraction", "data"), va="bottom",
                           ha="left", fontsize=0.85 * size, color=LIGHT.ink)  # fmt: skip
    sheet.size_bars(list(preview.pairs.values()))
    handles, _ = panels[0].get_legend_handles_labels()
    legend(sheet.figure, handles, size)
    return sheet.figure


def _lines(
    sheet: Sheet, panel: Axes, columns: Sequence[Column], values: Sequence[Sequence[float]]
) -> None:
    """Draws a line a sampler: the configured one in colour, the others from faint to strong.

    A language that is never drawn has no point.
    """
    dot = min(0.6 * sheet.size, 0.4 * sheet.slot + 1.2)
    for number, (one, line) in enumerate(zip(columns, values, strict=True)):
        drawn = np.array([value or np.nan for value in line])
        if number == 0:
            panel.plot(drawn, color=LIGHT.series[1], linewidth=2.2, marker="s", markersize=dot,
                       label=one.name, zorder=5)  # fmt: skip
            continue
        colour = _SHADES((number - 1) / max(len(columns) - 2, 1))
        panel.plot(drawn, color=colour, linewidth=1.6, label=one.name, zorder=3,
                   marker=_MARKERS[number % len(_MARKERS)], markersize=0.6 * dot)  # fmt: skip
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))


def html(preview: Preview, most_epochs: float, drawn: Figure) -> str:
    """Returns the text of the page, self-contained (`m4.html.render`), with the figure in it."""
    return pages.render(
        TEMPLATE,
        {"times": times, "short": short},
        preview=preview,
        most_epochs=most_epochs,
        over=repeated_more_than(preview, most_epochs),
        rows=[_row(preview, code) for code in preview.pairs],
        figure=inline(drawn, "Epochs and share of every language under each sampler"),
    )


def _row(preview: Preview, code: str) -> dict[str, Any]:
    drawn = preview.configured.drawn[code]
    return {
        "code": code,
        "name": describe(code).name,
        "pairs": preview.pairs[code],
        "tokens": preview.tokens[code],
        "drawn": drawn,
        "share": preview.share(drawn),
        "others": [
            {"share": preview.share(one.drawn[code]), "drawn": one.drawn[code]}
            if one.drawn
            else None
            for one in preview.columns[1:]
        ],
    }
