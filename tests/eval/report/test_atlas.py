"""The atlas of experts: its numbers by hand, its picture for few and many, the command."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from m4.data.languages import LANGUAGES
from m4.eval.report import atlas
from m4.eval.report.figures import png
from m4.train.measuring import routing_counts
from tests.command_line import m4

# Two languages, both directions, eight experts: an even share is 12.5%, twice that 25%.
DIRECTIONS = ["en-gl", "gl-en", "en-pt", "pt-en"]
ENCODER = [
    [10, 10, 20, 10, 10, 20, 20, 0],  # en-gl
    [30, 10, 20, 10, 10, 10, 10, 0],  # gl-en: 30% to expert 0
    [10, 10, 20, 10, 10, 20, 20, 0],  # en-pt
    [28, 10, 12, 10, 10, 10, 19, 1],  # pt-en: 28% to expert 0
]
EVEN = np.ones((4, 8), int).tolist()


def folder_of(path: Path, layers: dict[str, Any], split: str = "train") -> Path:
    path.mkdir(exist_ok=True)
    (path / "run.json").write_text("{}")
    found = routing_counts.Counts(DIRECTIONS)
    found.add(layers)
    about = {"split": split, "train_pairs": {"pt": 100, "gl": 60}}
    routing_counts.write(atlas.path_of(path, split), found, about)
    return path


def made(languages: list[str], experts: int, layers: list[str]) -> atlas.Atlas:
    """Makes random counts, with a dead expert 1 in each layer."""
    rng = np.random.default_rng(0)
    directions = [*(f"{code}-en" for code in languages), *(f"en-{code}" for code in languages)]
    found = {}
    for layer in layers:
        found[layer] = rng.integers(1, 1000, (len(directions), experts))
        found[layer][:, 1] = 0
    return atlas.Atlas(directions, [*languages, *languages], found)


def test_rows_are_ordered_by_group_size_and_depth(tmp_path: Path) -> None:
    names: list[str] = ["decoder_1", "encoder_11", "encoder_3"]
    layers = dict.fromkeys(names, EVEN)
    read = atlas.load(folder_of(tmp_path / "model", layers))
    assert read.directions == ["pt-en", "gl-en", "en-pt", "en-gl"]
    assert read.languages == ["pt", "gl", "pt", "gl"]
    assert list(read.layers) == ["encoder_3", "encoder_11", "decoder_1"]


def test_numbers_by_hand() -> None:
    count_DE = np.array(ENCODER)
    np.testing.assert_allclose(atlas.shares(count_DE)[1], [0.3, 0.1, 0.2, *[0.1] * 4, 0.0])
    # 400 choices; a tenth of an even share are 5 of them, expert 7 has 1.
    assert atlas.dead(count_DE) == [7]
    assert atlas.dead(np.array(EVEN)) == []
    # 5 is not under 5.
    at_the_edge = count_DE.copy()
    at_the_edge[0, 6:] = 16, 4
    assert atlas.dead(at_the_edge) == []
    assert atlas.specialists(count_DE) == {0: [1, 3]}
    assert atlas.specialists(np.array(EVEN)) == {}
    # All in one expert, half and half of eight (1 bit of 3), even.
    one, two = np.zeros((2, 1, 8), int)
    one[0, 3], two[0, [2, 5]] = 7, 4
    assert atlas.entropy(one) == 0.0
    np.testing.assert_allclose(atlas.entropy(two), 1 / 3)
    np.testing.assert_allclose(atlas.entropy(np.array(EVEN)), 1.0)
    # A direction without counts has no shares, and is no reason for NaN.
    assert not atlas.shares(np.zeros((2, 4), int)).any()


def test_the_command(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", {"encoder_1": ENCODER, "decoder_1": EVEN})
    said = m4("atlas", f"--model_dir={folder}")
    assert (said.status, said.err) == (0, "")
    lines = said.out.splitlines()
    assert "encoder_1: 8 experts, 400 choices, entropy of the load 0.9" in said.out
    assert "decoder_1: 8 experts, 32 choices, entropy of the load 1.000 (even: 1)" in lines
    # Expert 0 has 78 of 400 choices.
    (expert,) = [line.split() for line in lines if "gl 30%" in line]
    assert expert == ["0", "19.50%", "gl", "30%,", "pt", "28%"]
    assert [line for line in lines if "ALARM" in line] == [
        "ALARM encoder_1: 1 of 8 experts is dead (under 1.25% of the choices, a tenth of an even "
        "share): 7"
    ]
    assert lines[-1] == str(folder / "atlas.png")
    assert imread(folder / "atlas.png").shape[1] == 1400  # 7 inches at 200 points
    # The test sets' counts lie with the translations.
    (folder / "decodes").mkdir()
    folder_of(folder, {"decoder_1": EVEN}, "test")
    said = m4("atlas", f"--model_dir={folder}", "--split=test")
    assert said.out.splitlines()[-2:] == ["No dead experts.", str(folder / "decodes/atlas.png")]


def test_users_mistakes(tmp_path: Path) -> None:
    assert "give a run folder: --model_dir" in m4("atlas").mistake
    assert "missing: not a run folder" in m4("atlas", "--model_dir=missing").mistake
    folder = folder_of(tmp_path / "model", {"encoder_1": np.zeros((4, 8), int)})
    said = m4("atlas", f"--model_dir={folder}", "--split=test")
    assert "decodes/atlas.test.json: no such file; `m4 decode --model_dir=" in said.mistake
    assert "atlas.train.json: nothing is counted" in m4("atlas", f"--model_dir={folder}").mistake
    (folder / "atlas.train.json").write_text("{")
    assert "atlas.train.json: damaged (not JSON" in m4("atlas", f"--model_dir={folder}").mistake


@pytest.mark.parametrize(("languages", "experts"), [(1, 4), (100, 2048)])
def test_a_panel_a_layer_for_few_and_many(languages: int, experts: int) -> None:
    codes = list(LANGUAGES)[:languages]
    drawn = atlas.figure(made(codes, experts, ["encoder_1", "encoder_3", "decoder_1"]))
    *panels, _ = drawn.axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        "encoder_1", "decoder_1", "encoder_3",
    ]  # fmt: skip
    drawn.canvas.draw()
    first = [label.get_text() for label in panels[0].get_yticklabels()]
    assert first[: len(first) // 2] == first[len(first) // 2 :]
    assert set(first) <= set(codes)
    assert (len(set(first)) == len(codes)) == (languages <= 40)
    assert len(set(first)) >= min(len(codes), 15)
    # One scale.
    assert len({panel.images[0].norm.vmax for panel in panels}) == 1
    assert len({panel.images[0].norm.vmin for panel in panels}) == 1
    assert png(drawn).startswith(b"\x89PNG")
