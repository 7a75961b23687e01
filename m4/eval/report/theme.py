"""Colours of pictures and pages, on light and on dark paper."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """Colours. The series' are from Okabe and Ito's palette, which colour-blind readers can tell
    apart; each series also has a marker."""

    paper: str
    ink: str
    faint: str
    bar: str
    series: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#222222", "#d8d8d8", "#9a9a9a", ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
)
DARK = Theme(
    "#16181c", "#e4e4e4", "#3a3d44", "#85888f", ("#56B4E9", "#E69F00", "#2fc79a", "#e39ac3")
)
