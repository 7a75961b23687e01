"""Differences as LaTeX tables of booktabs and longtable."""

from collections.abc import Iterable, Mapping, Sequence

from m4.data.families import family_of
from m4.eval.scoring.delta import (
    METRIC_NAMES,
    SIGNIFICANT_MEANS,
    UNDERTRAINED,
    UNDERTRAINED_MEANS,
    Average,
    Delta,
    small_tests,
    small_tests_line,
)
from m4.eval.scoring.levels import LEVELS, ResourceLevels

_ESCAPES = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "Δ": r"$\Delta$",
        "≈": r"$\approx$",
        "○": r"$\circ$",
        "−": "$-$",
    }
)


def by_direction(rows: Iterable[Delta]) -> dict[str, dict[str, Delta]]:
    """Returns direction -> system -> its row, in the order of the rows."""
    found: dict[str, dict[str, Delta]] = {}
    for row in rows:
        found.setdefault(row.direction, {})[row.system] = row
    return found


def latex_text(rows: Sequence[Delta], means: Sequence[Average], levels: ResourceLevels) -> str:
    r"""Returns a table of the means by resource level, and one of the languages for each side.

    The document needs \usepackage{booktabs,longtable}.
    """
    sides = list(dict.fromkeys(row.side for row in rows))
    small = small_tests(rows, levels)
    parts = [
        "% By `m4 report`. In the document's head: \\usepackage{booktabs,longtable}",
    ]
    parts += [_means(rows, means)] if means else []
    parts += [_languages([row for row in rows if row.side == side], small, levels)
              for side in sides]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _means(rows: Sequence[Delta], means: Sequence[Average]) -> str:
    found: dict[tuple[str, str], dict[str, Average]] = {}
    for mean in means:
        found.setdefault((mean.side, mean.system), {})[mean.level] = mean
    shown = [name for name in (*LEVELS, "all") if any(name in at for at in found.values())]
    most = {name: max(at[name].languages for at in found.values() if name in at) for name in shown}
    lines = [r"\begin{tabular}{l" + "r" * len(shown) + "}", r"\toprule"]
    lines += [_line(["", *(f"{name} ({most[name]})" for name in shown)]), r"\midrule"]
    for (side, system), at in found.items():
        cells = [f"{system}, {side}".translate(_ESCAPES).replace("->", r"$\to$")]
        for name in shown:
            one = at.get(name)
            if one is None:
                cells.append("")
            elif one.undertrained:
                cells.append(UNDERTRAINED)
            else:
                bounds = f"[{_signed(one.low)}, {_signed(one.high)}]"
                cells.append(f"{_signed(one.delta)} {{\\scriptsize {bounds}}}")
        lines.append(_line(cells))
    about = f"% Mean differences from {rows[0].baseline}, 95% intervals by paired bootstrap."
    return "\n".join([about.replace("\n", " "), *lines, r"\bottomrule", r"\end{tabular}"])


def _languages(rows: Sequence[Delta], small: Mapping[str, str], levels: ResourceLevels) -> str:
    systems = list(dict.fromkeys(row.system for row in rows))
    metric = METRIC_NAMES.get(rows[0].metric, rows[0].metric)
    head = ["language", "family", "pairs", rows[0].baseline.translate(_ESCAPES)]
    for system in systems:
        head += [system.translate(_ESCAPES), r"$\Delta$"]
    lines = [r"\begin{longtable}{ll" + "r" * (len(head) - 2) + "}", r"\toprule"]
    lines += [_line(head), r"\midrule", r"\endhead", r"\bottomrule", r"\endfoot"]
    for direction, at in by_direction(rows).items():
        one = next(iter(at.values()))
        marks = " ≈" * bool(one.closely_related) + " ○" * (direction in small)
        name = (one.name + marks).translate(_ESCAPES)
        cells = [name, family_of(one.language), f"{one.train_pairs:,}".replace(",", "{,}")]
        cells.append(f"{one.baseline_score:.1f}")
        for system in systems:
            row = at.get(system)
            cells += ["", ""] if row is None else [f"{row.system_score:.1f}", _difference(row)]
        lines.append(_line(cells))
    side = rows[0].side.replace("->", " to ")
    about = [f"{metric}, {side}. An asterisk: the 95% interval of the difference leaves out 0"]
    about += [f"Two asterisks: {SIGNIFICANT_MEANS}"] * any(row.significant for row in rows)
    about += [f"{UNDERTRAINED}: {UNDERTRAINED_MEANS}"] * any(row.undertrained for row in rows)
    about += ["≈ closely related to another language"] * any(row.closely_related for row in rows)
    about += [f"○ {small_tests_line(small, levels)}"] * bool(small)
    comment = "\n".join("% " + line for line in about)
    return "\n".join([comment, *lines, r"\end{longtable}"])


def _difference(row: Delta) -> str:
    if row.undertrained:
        return UNDERTRAINED
    if row.significant:
        return _signed(row.delta) + r"$^{\ast\ast}$"
    return _signed(row.delta) + r"$^{\ast}$" * (row.low > 0 or row.high < 0)


def _signed(value: float) -> str:
    return f"${value:+.1f}$"


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
