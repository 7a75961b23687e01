"""Shared parts of the figures in reports: colours, fonts, legends and files."""

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from m4.settings import InputError
from m4.storage.files import whole


class LIGHT:
    """Colours on a light background; with a dark background, a page inverts its figures.

    Series have colours of Okabe and Ito's palette, which colour-blind readers can tell apart.
    Families have Tol's muted colours, the last one for the rest.
    """

    paper, ink, faint, bar = "#ffffff", "#222222", "#d8d8d8", "#9a9a9a"
    series = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
    families = (
        *("#332288", "#CC6677", "#DDCC77", "#117733", "#88CCEE", "#882255", "#44AA99", "#999933"),
        *("#AA4499", "#9a9a9a"),
    )


# From background to ink through one hue, even in lightness, so that no colours are confused.
SEQUENTIAL = LinearSegmentedColormap.from_list(
    "share", ["#f4f7fa", "#8fc4e8", "#1a73b4", "#06203f"]
)

FEW = 40  # number of languages whose labels fit a page's width at full size
SIZE = 11.0  # font size in points on a page 7 inches wide
# No dates or versions, so that the same figure gives the same bytes.
METADATA: Mapping[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
}
POINTS = 72  # an inch
_DPI = 200


def halfway(colour: str) -> str:
    """Returns the colour halfway between `colour` and the paper."""
    return to_hex(tuple((np.array(to_rgb(colour)) + np.array(to_rgb(LIGHT.paper))) / 2))


def blank(width: float, height: float, **options: Any) -> Figure:
    """Returns an empty figure of this size in inches, without pyplot and its global state."""
    drawn = Figure((width, height), **options)
    FigureCanvasAgg(drawn)
    drawn.set_facecolor(LIGHT.paper)
    return drawn


def _save(drawn: Figure, to: Any, suffix: str, salt: str = "m4", **settings: Any) -> None:
    """Writes the figure; the same figure gives the same bytes."""
    for text in drawn.findobj(Text):  # a "$" in a name starts no formula
        text.set_parse_math(False)
    # Without a salt, names inside an SVG are random.
    with rc_context(cast(Any, {"svg.hashsalt": salt, "text.parse_math": False, **settings})):
        drawn.savefig(to, format=suffix[1:], dpi=_DPI, metadata=METADATA[suffix])


def save(drawn: Figure, paths: Iterable[Path]) -> None:
    """Writes the figure to every path. Raises InputError for a path that is not .png or .svg."""
    for path in paths:
        if path.suffix not in METADATA:
            raise InputError(f"{path}: a plot is .png or .svg")
        with whole(path) as unfinished:
            _save(drawn, unfinished, path.suffix)


def png(drawn: Figure) -> bytes:
    """Returns the figure as the bytes of a PNG file."""
    _save(drawn, buffer := io.BytesIO(), ".png")
    return buffer.getvalue()


def inline(drawn: Figure, label: str, kind: str = "figure") -> Markup:
    """Returns the figure as an SVG element in a page's font and on its background.

    An artist with the gid "language:gl" becomes a group with data-language="gl", for the script.

    Args:
        label: Text for readers who cannot see the figure.
        kind: CSS class of the element.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # text is drawn by the reader's fonts
        page = {"svg.fonttype": "none", "savefig.transparent": True}
        _save(drawn, buffer, ".svg", label, **page)
    _, _, text = buffer.getvalue().partition("<svg ")
    head, _, body = text.partition(">")
    (box,) = re.findall(r'viewBox="[^"]*"', head)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r' id="language:([^"]*)"', r' data-language="\1"', body)
    # Numbered names, to which nothing refers, would repeat in the page's next figure.
    body = re.sub(r' id="[\w.]+_\d+"', "", body)
    body = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", body)
    # All text in a figure's body has been escaped by matplotlib.
    opening = Markup('<svg class="{}" role="img" aria-label="{}" {}>').format(
        kind, label, Markup(box)
    )
    return opening + Markup(body)


def page_size(many: bool) -> tuple[float, float]:
    """Returns the width in inches and the font size in points, legible also on a phone."""
    return (10.0, 15.0) if many else (7.0, SIZE)


def style(panel: Axes, size: float = SIZE) -> None:
    """Gives a panel horizontal grid lines and no frame."""
    panel.set_facecolor(LIGHT.paper)
    panel.grid(axis="y", color=LIGHT.faint, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(LIGHT.faint)
    panel.tick_params(labelsize=0.9 * size, colors=LIGHT.ink, length=0, bottom=False)


def colorbar(drawn: Figure, shown: ScalarMappable, size: float, **options: Any) -> Colorbar:
    """Adds the scale of a heat map."""
    bar = drawn.colorbar(shown, **options)
    assert bar.solids is not None
    bar.solids.set_rasterized(True)
    bar.ax.tick_params(labelsize=0.9 * size, colors=LIGHT.ink, length=0)
    cast(Any, bar.outline).set_visible(False)
    return bar


def legend(drawn: Figure, handles: Sequence[Any], size: float, below: bool = False) -> None:
    """Adds a legend above or below the panels, in as few lines as fit the figure's width."""
    letters = [0.55 * len(handle.get_label()) + 3.6 for handle in handles]
    across = drawn.get_figwidth() * POINTS / (0.95 * size)
    fits = (columns for columns in range(len(handles), 1, -1)
            if sum(map(max, np.array_split(letters, columns))) < across)  # fmt: skip
    place = "outside lower center" if below else "outside upper center"
    drawn.legend(handles=handles, loc=place, ncols=next(fits, 1), frameon=False,
                 fontsize=0.95 * size, labelcolor=LIGHT.ink, columnspacing=1.2,
                 handlelength=1.4)  # fmt: skip
