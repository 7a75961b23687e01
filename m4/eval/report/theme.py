"""Colours of pictures and pages, on light and on dark paper."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """Colours.

    Those of series are from Okabe and Ito's palette, which colour-blind readers can tell apart.
    Those of families are Tol's muted ones, the last for the rest; on dark paper the dark ones are
    lighter.
    """

    paper: str
    ink: str
    faint: str
    bar: str
    series: tuple[str, ...]
    families: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#222222", "#d8d8d8", "#9a9a9a",
    ("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    ("#332288", "#CC6677", "#DDCC77", "#117733", "#88CCEE", "#882255", "#44AA99", "#999933",
     "#AA4499", "#9a9a9a"),
)  # fmt: skip
DARK = Theme(
    "#16181c", "#e4e4e4", "#3a3d44", "#85888f",
    ("#56B4E9", "#E69F00", "#2fc79a", "#e39ac3"),
    ("#8f7fe8", "#e08a99", "#DDCC77", "#3fae66", "#88CCEE", "#c8588f", "#44AA99", "#b5b54a",
     "#cc77bb", "#85888f"),
)  # fmt: skip
