"""What the figures of reports share: a sheet of panels over languages, and how they are saved."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from m4.eval.report.theme import Theme
from m4.settings import InputError
from m4.storage.files import whole

FEW = 40  # up to so many languages fit a page's width with labels of full size
# Without dates and versions: the same figure gives the same bytes.
METADATA: Mapping[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    ".svg": {"Date": None, "Creator": None},
}
_POINTS = 72  # an inch
_DPI = 200


def png(drawn: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DPI, metadata=METADATA[".png"])
    return buffer.getvalue()


def save(drawn: Figure, paths: Iterable[Path]) -> None:
    """Writes the figure to every path. ValueError: a path that is not .png, .pdf or .svg."""
    for path in paths:
        if path.suffix not in METADATA:
            raise InputError(f"{path}: a plot is .png, .pdf or .svg")
        # Else the names inside an SVG are random.
        with whole(path) as unfinished, rc_context({"svg.hashsalt": "m4"}):
            drawn.savefig(unfinished, dpi=_DPI, metadata=METADATA[path.suffix])


def page_size(many: bool) -> tuple[float, float]:
    """(width in inches, letters in points). Letters grow with the page: shrunk to a phone's width,
    the axes stay legible either way."""
    return (10.0, 15.0) if many else (7.0, 11.0)


@dataclass(frozen=True)
class Sheet:
    """A figure of panels one above the other, with languages at x = 0, 1, 2, ...

    size: of letters, points. slot: points of width that a language has.
    """

    figure: Figure
    panels: list[Axes]
    labels: Sequence[str]
    theme: Theme
    size: float
    slot: float

    @classmethod
    def make(
        cls, labels: Sequence[str], ratios: Sequence[float], inches: float, theme: Theme
    ) -> Sheet:
        """ratios: heights of the panels; inches: of all of them on a page 7 inches wide."""
        width, size = page_size(len(labels) > FEW)
        slot = 0.87 * width * _POINTS / len(labels)
        letters, upright = _label_letters(labels, size, slot)
        below = 0.6 * letters * max(map(len, labels)) / _POINTS if upright else 0.0
        drawn = Figure((width, inches * width / 7.0 + below), layout="constrained")
        FigureCanvasAgg(drawn)
        drawn.set_facecolor(theme.paper)
        grid = drawn.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)
        return cls(drawn, list(grid[:, 0]), labels, theme, size, slot)

    def style(self, panel: Axes) -> None:
        theme = self.theme
        panel.set_facecolor(theme.paper)
        panel.grid(axis="y", color=theme.faint, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(theme.faint)
        panel.tick_params(labelsize=0.9 * self.size, colors=theme.ink, length=0, bottom=False)
        panel.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _signed(y)))

    def size_bars(
        self, sizes: Sequence[int], note: str = "", colours: Sequence[str] | None = None
    ) -> None:
        """The last panel: training pairs of every language as bars on a log scale (their foot is
        half of the smallest), with figures where they fit, and below the languages' labels.

        colours: of the bars, one a language; None: all alike."""
        panel, theme, size = self.panels[-1], self.theme, self.size
        self.style(panel)
        floor = min(sizes) / 2
        panel.bar(range(len(sizes)), [n - floor for n in sizes], 0.72, floor,
                  color=colours or theme.bar)  # fmt: skip
        panel.set_yscale("log")
        panel.set_ylim(floor, max(sizes) * 1.3)
        panel.set_ylabel("training\npairs", fontsize=0.85 * size, color=theme.ink)
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_xlim(-0.7, len(sizes) - 0.3)
        texts = [_short(n) for n in sizes]
        if 0.6 * 0.8 * size * max(map(len, texts)) < self.slot:
            panel.set_yticks([])
            panel.spines[["left"]].set_visible(False)
            for i, text in enumerate(texts):
                panel.annotate(text, (i, sizes[i]), va="bottom", ha="center", fontsize=0.8 * size,
                               color=theme.ink)  # fmt: skip
        else:
            ends = sorted({max(sizes), min(sizes)})
            panel.set_yticks(ends, [_short(n) for n in ends])
        panel.minorticks_off()
        letters, upright = _label_letters(self.labels, size, self.slot)
        panel.set_xticks(range(len(self.labels)), self.labels, fontsize=letters, color=theme.ink,
                         rotation=90 if upright else 0)  # fmt: skip
        text = "languages, by falling number of training pairs" + note
        panel.set_xlabel(text, fontsize=0.95 * size, color=theme.ink)

    def legend(self, columns: int, handles: Sequence[Any], below: bool = False) -> None:
        """Above the panels, or below them."""
        place = "outside lower center" if below else "outside upper center"
        self.figure.legend(handles=handles, loc=place, ncols=columns,
                           frameon=False, fontsize=0.95 * self.size, labelcolor=self.theme.ink,
                           columnspacing=1.2, handlelength=1.4)  # fmt: skip


def _signed(y: float) -> str:
    return f"{y:+.0f}".replace("-", "−") if round(y) else "0"


def _short(pairs: int) -> str:
    """1234567 -> '1.2M', 6000 -> '6k', 250 -> '250'."""
    for unit, letter in ((10**6, "M"), (10**3, "k")):
        if pairs >= unit:
            return f"{pairs / unit:.1f}".removesuffix(".0") + letter
    return str(pairs)


def _label_letters(labels: Sequence[str], size: float, slot: float) -> tuple[float, bool]:
    """The size of the letters in points, and whether the labels are upright."""
    letters = 0.95 * size
    if 0.62 * letters * max(map(len, labels)) < slot:
        return letters, False
    return min(letters, 0.92 * slot), True
