"""`m4 eval --zero_shot`: directions without training pairs, next to a pivot through English."""

from pathlib import Path

import pytest

from m4.data.directions import zero_shot_directions
from m4.jobs.decoding import zero_shot
from m4.jobs.decoding.testsets import pivoted
from m4.storage.files import read_json, read_jsonl
from tests.command_line import m4

# The run's languages: each with English, both ways.
LANGUAGES = ("es", "pt", "gl")


def news(folder: Path) -> str:
    """Returns the flag of a test set of its own, with one sentence of Galician into Portuguese."""
    own = folder / "own"
    own.mkdir()
    (own / "gl-pt.tsv").write_text("ola\tolá\n", "utf-8")
    (folder / "news.gin").write_text(
        "from m4.data import testsets\n"
        "experiment.Experiment.testsets = {'news': @testsets.Table()}\n"
        f"testsets.Table.folder = '{own}'\ntestsets.Table.files = '{{pair}}.tsv'\n"
        "testsets.Table.header = ['source', 'target']\n"
    )
    return f"--testset={folder / 'news.gin'}"


def test_a_pivot_is_two_passes() -> None:
    seen = []

    def translate(tagged: list[str], directions: list[str]) -> list[dict[str, str]]:
        seen.append((tagged, directions))
        return [{"hypothesis": text.upper() + "!"} for text in tagged]

    found = pivoted(translate, "en")(["<2wo> a b", "<2fr> c"], ["fr-wo", "wo-fr"])
    second = ["<2wo> <2EN> A B!", "<2fr> <2EN> C!"]
    assert seen == [(["<2en> a b", "<2en> c"], ["fr-en", "wo-en"]), (second, ["en-wo", "en-fr"])]
    assert found[0] == {"hypothesis": second[0].upper() + "!", "through": "<2EN> A B!"}


def test_directions_without_pairs() -> None:
    """A language that is only a source, or only a target, has one side; '~bt' is no language."""
    assert zero_shot_directions(["en-fr", "fr-en", "en-wo"]) == ["fr-wo"]
    assert zero_shot_directions(["en-fr", "fr-en", "fr~bt-en"]) == []


@pytest.mark.slow
def test_scores_differences_rates_and_heat_maps(own: Path) -> None:
    m4("eval", own, "--zero_shot", "--beams=1").ok()
    directions = {f"{a}-{b}" for a in LANGUAGES for b in LANGUAGES if a != b}
    folder = own / "decodes" / "beams=1"
    for name in ("zero_shot", "pivot"):
        found = {path.name.split(".")[1] for path in (folder / name).glob("test.*.jsonl")}
        assert found == directions
    rows = read_jsonl(folder / "pivot" / "test.gl-pt.jsonl")
    assert all("through" in row for row in rows)
    assert read_json(folder / "pivot" / "test.gl-pt.json")["through"] == "en"
    page = folder / "zero_shot"
    scores = read_jsonl(page / "scores.jsonl")
    assert {(row["system"], row["metric"]) for row in scores if row["direction"] == "gl-pt"} == {
        (system, metric) for system in ("zero_shot", "pivot", "copy") for metric in ("bleu", "chrf")
    }
    # Training pairs: 60 of Galician with English, 100 of Portuguese.
    assert {row["train_pairs"] for row in scores if row["direction"] == "gl-pt"} == {60}
    deltas = read_jsonl(page / "deltas.jsonl")
    assert {(row["direction"], row["baseline"]) for row in deltas} == {
        (direction, "pivot") for direction in directions
    }
    assert {row["system"] for row in read_jsonl(page / "rates.jsonl")} == {
        "reference", "zero_shot", "pivot",
    }  # fmt: skip
    assert 'aria-label="ΔBLEU of zero_shot against pivot"' in (page / "report.html").read_text()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/test.*.jsonl")}
    m4("eval", own, "--zero_shot=2", "--beams=1").ok()  # what is there is kept
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/test.*.jsonl")}
    assert len({row["direction"] for row in read_jsonl(page / "scores.jsonl")}) == 2


@pytest.mark.slow
def test_a_test_set_of_its_own(own: Path, tmp_path: Path) -> None:
    said = m4("eval", own, "--zero_shot", news(tmp_path), "--beams=1").ok()
    assert "news: has no references for es-pt, es-gl, " in said.err
    assert "(5 of 6 directions)" in said.err
    folder = own / "decodes" / "beams=1"
    (row,) = read_jsonl(folder / "pivot" / "news.gl-pt.jsonl")
    assert (row["source"], row["reference"]) == ("ola", "olá")
    scores = read_jsonl(folder / "zero_shot.news" / "scores.jsonl")
    assert {row["direction"] for row in scores} == {"gl-pt"}


def test_mistakes_are_a_line_before_anything_is_built(
    own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(zero_shot.testsets, "PortionDecoder", lambda *_: pytest.fail("built"))

    def mistake(*more: str) -> str:
        return m4("eval", own, *more).mistake

    for asked, said in {
        "0": "--zero_shot=0: must be all, a number of directions above 0, or directions",
        "some": "--zero_shot=some: must be all",
        "gl-xx": "to = 'xx': this model does not translate into it.",
        "xx-gl": "--zero_shot=xx-gl: this model does not translate from xx; it knows: en, es, gl",
        "gl-en": "--zero_shot=gl-en: has training pairs",
    }.items():
        assert said in mistake(f"--zero_shot={asked}")
    assert "--zero_shot=all: not with --watch" in mistake("--zero_shot", "--steps=all")
    said = mistake("--zero_shot=gl-pt,pt-gl", news(tmp_path))
    assert said.endswith("news: has no references for pt-gl")
