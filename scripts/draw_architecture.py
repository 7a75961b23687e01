"""Draws docs/images/architecture.svg from the code: `python scripts/draw_architecture.py`.

A box is a room of m4/ (a folder or a file), a band a layer of import-linter's contract in
pyproject.toml, an arrow the imports of one room from another, counted in the syntax trees.
"""

import argparse
import ast
import collections
import dataclasses
import re
import tomllib
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"


@dataclasses.dataclass(frozen=True)
class Graph:
    """Rooms of the code.

    Attributes:
        layers: Rooms by layer, from the top.
        texts: Room -> the first line of its docstring.
        folders: Room -> its folders.
        imports: (importer, imported) -> number of imports.
    """

    layers: list[list[str]]
    texts: dict[str, str]
    folders: dict[str, list[str]]
    imports: dict[tuple[str, str], int]


def read_graph(root: Path = ROOT) -> Graph:
    """Reads the graph from the code."""
    layers = _layers(root)
    rooms = [room for layer in layers for room in layer]
    texts = {room: _first_line(root / "m4", room) for room in rooms}
    folders = {
        room: sorted(init.parent.name for init in (root / "m4" / room).glob("*/__init__.py"))
        for room in rooms
    }
    imports: collections.Counter[tuple[str, str]] = collections.Counter()
    for path in sorted((root / "m4").rglob("*.py")):
        importer = path.relative_to(root / "m4").parts[0].removesuffix(".py")
        for module in imported_modules(path, root):
            imported = module.split(".")[1]
            if importer in rooms and imported in rooms and importer != imported:
                imports[importer, imported] += 1
    return Graph(layers, texts, folders, dict(imports))


def _layers(root: Path) -> list[list[str]]:
    """Reads the layers of the contract, with the rooms that exist."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["type"] == "layers")
    found = [re.split(r"\s*[|:]\s*", layer.strip("() ")) for layer in contract["layers"]]
    names = [[name.strip("() ") for name in layer] for layer in found]
    package = root / "m4"
    there = [
        [n for n in layer if (package / n).is_dir() or (package / f"{n}.py").is_file()]
        for layer in names
    ]
    return [layer for layer in there if layer]


def _first_line(package: Path, room: str) -> str:
    """Returns the first line of a room's docstring, as plain text."""
    path = package / room / "__init__.py"
    path = path if path.is_file() else package / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("`", "")


def imported_modules(path: Path, root: Path) -> set[str]:
    """Returns the modules of m4 that a file imports, anywhere in the file, each once."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = root.joinpath(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return {name for name in found if name.startswith("m4.")}


# ------------------------------------------------------------------------------------ the drawing
# Units are points. A room's imports run from its box to a separate vertical line and from there
# to the boxes below: no line passes through a box.
LEFT, BOX, RIGHT, BETWEEN_LINES = 10.0, 330.0, 12.0, 24.0
ROW, LINE, GAP = 12.5, 11.0, 7.0
COLOURS = ("#3a6ea5", "#b4552d", "#4d7c4a", "#7a5195", "#8a6d1f", "#2f7f83", "#a23b5a", "#6b6b6b")


def draw(graph: Graph, path: Path) -> None:
    """Writes the picture; the same graph gives the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "m4", "svg.fonttype": "none", "font.size": 9})
    from matplotlib.figure import Figure

    # Rooms of the last layer, which all may use, have no arrows: they would hide the others.
    common = graph.layers[-1]
    rooms = [room for layer in graph.layers for room in layer]
    arrows = {pair: n for pair, n in graph.imports.items() if pair[1] not in common}
    importers = {room: [r for r in rooms if (r, room) in arrows] for room in rooms}
    sources = [room for room in rooms if any(a == room for a, _ in arrows)]
    lines = {room: _lines(graph, room, room in common) for room in rooms}
    heights = {r: max(30 + LINE * len(lines[r]), ROW * (len(importers[r]) + 1.5)) for r in rooms}
    tops: dict[str, float] = {}
    height = GAP
    for layer in graph.layers:
        for room in layer:
            tops[room], height = height, height + heights[room] + GAP
        height += GAP
    width = LEFT + BOX + 44 + BETWEEN_LINES * (len(sources) - 1) + RIGHT
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")

    for layer in graph.layers:
        if len(layer) > 1 and layer is not common:
            bottom = tops[layer[-1]] + heights[layer[-1]]
            _box(
                axes,
                LEFT - 5,
                tops[layer[0]] - 5,
                BOX + 10,
                bottom - tops[layer[0]] + 10,
                "#dddcd2",
            )
    for room in rooms:
        _box(axes, LEFT, tops[room], BOX, heights[room], "#f8f8f3", "#444444")
        y = tops[room] + (heights[room] - LINE * len(lines[room])) / 2
        axes.text(LEFT + 12, y, room, fontsize=15, weight="bold", va="center")
        for k, line in enumerate(lines[room]):
            y_line = y + 17 + LINE * k
            axes.text(LEFT + 12, y_line, line, fontsize=8.5, color="#333333", va="center")
    for k, room in enumerate(sources):
        x = LEFT + BOX + 44 + BETWEEN_LINES * (len(sources) - 1 - k)
        start = tops[room] + ROW / 2
        ends = {
            target: (tops[target] + ROW * (importers[target].index(room) + 1.5), count)
            for (importer, target), count in sorted(arrows.items())
            if importer == room
        }
        _arrows(axes, x, start, list(ends.values()), COLOURS[k % len(COLOURS)])
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, facecolor="white")


def _lines(graph: Graph, room: str, is_common: bool) -> list[str]:
    """Returns the lines in a room's box under its name."""
    folders = ["folders: " + ", ".join(graph.folders[room])] if graph.folders[room] else []
    used = sum(count for (_, imported), count in graph.imports.items() if imported == room)
    counted = [f"imported {used} times"] if is_common else []
    return [line for text in [graph.texts[room], *folders, *counted] for line in wrap(text, 62)]


def _arrows(axes: Any, x: float, start: float, ends: list[tuple[float, int]], colour: str) -> None:
    """Draws from the box's edge at `start` to the line at x, along it, and back to each end."""
    edge = LEFT + BOX
    every = [start, *(y for y, _ in ends)]
    style = {"color": colour, "linewidth": 1.2, "solid_capstyle": "round"}
    axes.plot([edge, x], [start, start], **style)
    axes.plot([x, x], [min(every), max(every)], **style)
    head = {"arrowstyle": "-|>,head_width=.22,head_length=.45", "color": colour, "linewidth": 1.2}
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for y, count in ends:
        axes.annotate("", (edge, y), (x, y), arrowprops={**head, "shrinkA": 0, "shrinkB": 0})
        place = {"ha": "center", "va": "center", "bbox": white}
        axes.text(edge + 22, y + 0.5, str(count), color=colour, fontsize=9, **place)


def _box(
    axes: Any, x: float, y: float, width: float, height: float, face: str, edge: str = "none"
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE, help="(%(default)s)")
    draw(read_graph(), parser.parse_args().picture)
