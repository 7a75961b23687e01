"""The pictures of a family of plans: memory, compilation and traffic against devices and depth."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from m4.eval.report.figures import METADATA
from m4.eval.report.theme import LIGHT
from m4.plan.machines import GIB
from m4.storage.files import whole

NOTES = (
    "Top left: memory a device at equal tokens a core (2,048 of source and of target), as experts "
    "and devices grow together (the paper's figure 7). Top right: memory against depth, 2,048 "
    "experts; at 60 layers all weights are sharded. Bottom left: CPU seconds of compiling. Bottom "
    "right: bytes of all-to-all and all-reduce a device and step at equal tokens a core.",
)
_TOKENS_A_CORE = 2048
_STACKED = ("replicated weights", "expert weights", "temporaries")


def draw(rows: Sequence[Mapping[str, Any]], stem: Path) -> list[Path]:
    """Writes stem.png and .pdf; the same rows give the same bytes."""
    drawn = figure(rows)
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".png", ".pdf")]
    for path in paths:
        with whole(path) as unfinished:
            drawn.savefig(unfinished, dpi=150, metadata=METADATA[path.suffix])
    return paths


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture as a PNG in base64."""
    buffer = io.BytesIO()
    figure(rows).savefig(buffer, format="png", dpi=110, metadata=METADATA[".png"])
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Four panels; a panel without plans stays empty."""
    drawn = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(2, 2)
    equal = [row for row in rows if equal_tokens(row)]
    _memory_by_devices(panels[0][0], equal)
    _memory_by_depth(panels[0][1], equal)
    _lines(
        panels[1][0],
        equal,
        {"{} layers": lambda row: row["compiler"]["compile_cpu_seconds"]},
        "CPU seconds of compiling",
    )
    printed = [row for row in equal if "collectives" in row]
    _lines(
        panels[1][1],
        printed,
        {
            "all-to-all, {} layers": lambda row: _sent(row, "all-to-all"),
            "all-reduce, {} layers": lambda row: _sent(row, "all-reduce"),
        },
        "GiB a device and step",
    )
    return drawn


def equal_tokens(row: Mapping[str, Any]) -> bool:
    """Whether it is a plan of experts at as many tokens a core as the others have."""
    tokens = row["batch"]["rows"] * row["batch"]["source_length"] // row["devices"]
    unchanged = row.get("label", "") in ("", "quarter batch") and "refused" not in row
    return bool(row["model"]["experts"]) and tokens == _TOKENS_A_CORE and unchanged


def layers(row: Mapping[str, Any]) -> int:
    return row["model"]["encoder_layers"] + row["model"]["decoder_layers"]


def _sent(row: Mapping[str, Any], kind: str) -> float:
    return row["collectives"].get(kind, {"payload_bytes": 0})["payload_bytes"] / GIB


def _memory_by_devices(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: (layers(row), row["devices"]))
    rows = [row for row in rows if layers(row) in (12, 36)]
    names = [f"{row['devices']}\n{layers(row)}L" for row in rows]
    _bars(axes, rows, names, "cores = experts a layer, layers")


def _memory_by_depth(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    rows = sorted((row for row in rows if row["model"]["experts"] == 2048), key=layers)
    _bars(axes, rows, [f"{layers(row)}L" for row in rows], "layers, 2,048 experts")


def _bars(axes: Axes, rows: Sequence[Mapping[str, Any]], names: list[str], label: str) -> None:
    bottoms = [0.0] * len(rows)
    places = range(len(rows))
    for kind, colour in zip(_STACKED, LIGHT.series, strict=False):
        heights = [row["memory_bytes"][kind] / GIB for row in rows]
        axes.bar(places, heights, bottom=bottoms, color=colour, label=kind)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    axes.set_xticks(list(places), names)
    axes.set_xlabel(label)
    axes.set_ylabel("GiB a device (of 16)")
    if rows:
        axes.legend(frameon=False, fontsize="small")


def _lines(axes: Axes, rows: Sequence[Mapping[str, Any]], series: Mapping, label: str) -> None:
    colours = iter(LIGHT.series)
    for name, value in series.items():
        for depth in (12, 36):
            chosen = sorted(
                (row for row in rows if layers(row) == depth), key=lambda row: row["devices"]
            )
            if not chosen:
                continue
            axes.plot(
                [row["devices"] for row in chosen],
                [value(row) for row in chosen],
                marker="o",
                color=next(colours),
                label=name.format(depth),
            )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cores")
    axes.set_ylabel(label)
    if axes.lines:
        axes.set_xticks([128, 512, 2048], ["128", "512", "2048"])
        # Room above for the legend.
        axes.set_ylim(top=1.45 * axes.get_ylim()[1])
        axes.legend(frameon=False, fontsize="small", loc="upper left")
