"""The picture in ARCHITECTURE.md."""

import re

from scripts import draw_architecture as script


def test_the_committed_picture_names_every_room() -> None:
    drawn = re.findall(r"<text[^>]*>([^<]+)</text>", script.PICTURE.read_text("utf-8"))
    rooms = {room for layer in script.read_graph().layers for room in layer}
    assert rooms <= {*drawn}, "run: .venv/bin/python scripts/draw_architecture.py"
