"""`scripts/zero_shot.py`'s text, and the page of results/zero_shot."""

import dataclasses
from itertools import combinations
from pathlib import Path

import pytest

from m4.data.directions import pair_of
from m4.data.splits import normal
from m4.eval.metrics.bleu import bleu
from m4.eval.scoring.score import COPY, score_rows
from m4.storage.files import write_jsonl
from scripts.results import kept, zero_shot
from scripts.results.kept import Kept
from scripts.zero_shot import RING, pairs_at, prepare

SPLITS = ("train", "dev", "test")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Language k has sentences that k does not divide; one in 7 has a second English sentence."""
    folder, out = tmp_path_factory.mktemp("tatoeba"), tmp_path_factory.mktemp("text")
    for k, code in enumerate(RING, 2):
        lines = [f"English {n}\t{code} {n}\n" for n in range(400) if n % k]
        lines += [f"Other {n}\t{code.upper()} {n}\n" for n in range(0, 400, 7) if n % k]
        for at, split in enumerate(SPLITS):
            (folder / f"{code}.{split}.tsv").write_text("".join(lines[at::3]), "utf-8")
    prepare(folder, out)
    return out


def read(text: Path, pair: str, split: str) -> list[list[str]]:
    return [line.split("\t") for line in (text / f"{pair}.{split}.tsv").read_text().splitlines()]


def test_no_held_out_sentence_is_trained_on_in_any_language(text: Path) -> None:
    held, trained, sizes = set(), set(), dict.fromkeys(SPLITS, 0)
    pairs = [*map(pair_of, RING), *(pair_of(f"{a}-{b}") for a, b in combinations(RING, 2))]
    for pair in pairs:
        for split in SPLITS:
            rows = read(text, pair, split)
            sizes[split] += len(rows)
            sides = {(code, normal(side)) for row in rows
                     for code, side in zip(pair.split("-"), row, strict=True)}  # fmt: skip
            (trained if split == "train" else held).update(sides)
    assert not held & trained
    assert min(sizes.values()) > 400
    # Both English sentences of a translation: where one is held out, it is trained on with neither.
    assert any(side.startswith("other") for code, side in trained if code == "en")


def test_test_sets_of_two_languages_are_what_they_share(text: Path) -> None:
    """In the same order, so that a trained and an untrained direction have the same sentences."""
    deu, fra = (dict(read(text, f"en-{code}", "test")) for code in ("deu", "fra"))
    shared = [[deu[english], fra[english]] for english in deu if english in fra]
    assert shared == read(text, "deu-fra", "test")


def test_each_pair_of_the_ring_has_one_distance() -> None:
    every = [pair for far in range(1, 6) for pair in pairs_at((far,))]
    assert len(every) == len({*every}) == 55
    assert pairs_at((1, 3, 5)) == sorted(set(every) - {*pairs_at((2, 4))})


def system(name: str, hypotheses: dict[str, list[str]]) -> Kept:
    """Kept rows of translations whose references are 'a b c d e'."""
    one = Kept(name)
    for direction, texts in hypotheses.items():
        counts = bleu(texts, ["a b c d e"] * len(texts), "en")
        one.statistics[direction, "bleu"] = counts.counts
        one.directions[direction] = {
            "sentences": len(texts), "test_sha256": "x", "step": 1,
            "signatures": {"bleu": counts.signature},
        }  # fmt: skip
    return one


def test_comparisons_and_the_page(tmp_path: Path) -> None:
    right, wrong = ["a b c d e"] * 60, ["x"] * 60
    both = ("fra-deu", "deu-fra")
    found = [
        system("many", {"fra-spa": right, "en-fra": right}),
        system("many_zero_shot", dict.fromkeys(both, right)),
        system("many_pivot", {"fra-deu": right, "deu-fra": wrong}),
        system(COPY, dict.fromkeys([*both, "fra-spa"], wrong)),
    ]
    text = {field.name: "x" for field in dataclasses.fields(kept.Asked)}
    asked = kept.Asked(**{**text, "folder": tmp_path, "runs": {"many": ""}, "curves": {},
        "starts": {}, "zero_shot": {"before": "Said before.", "compared": [
            ["many_zero_shot", "many_pivot", "unseen"], ["many", "other_pivot", "trained"]]},
    })  # fmt: skip
    assert zero_shot.systems(asked) == ["many_zero_shot", "many_pivot"]
    rates = [{"system": "many_pivot", "direction": "deu-fra", "off_language": 0.5}]
    mean, *each = zero_shot.rows(asked, found, rates)
    # One direction is as good, one is all right against all wrong.
    assert (mean.about, mean.directions, mean.sentences) == ("unseen", 2, 120)
    assert (mean.delta, mean.other_off_target) == (pytest.approx(50.0), 0.5)
    assert {row.about: round(row.delta) for row in each} == {"fra-deu": 0, "deu-fra": 100}
    rows = score_rows(kept.measured(found), {})
    write_jsonl(tmp_path / "scores.jsonl", rows)
    page = "\n".join(zero_shot.sections(asked, [mean, *each]))
    assert "| many_zero_shot | many_pivot | 2 unseen | BLEU | 100.0 | 50.0 | +50.0 [" in page
    assert "| German → French | 60 | 100.0 | 0.0 | +100.0 [" in page
    assert "(2 unseen directions)" in zero_shot.here([mean, *each])
    paths = zero_shot.draw(asked, [mean, *each], tmp_path)
    assert [path.name for path in paths if path.suffix == ".png"] == [
        "zero_shot.png", "against_pivot.png",
    ]  # fmt: skip
