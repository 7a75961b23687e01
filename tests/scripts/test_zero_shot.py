"""`scripts/zero_shot.py`'s text; its comparisons are in test_results.py, with those committed."""

from itertools import combinations
from pathlib import Path

import pytest

from m4.data.directions import pair_of
from m4.data.splits import normal
from scripts.zero_shot import RING, prepare

SPLITS = ("train", "dev", "test")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes for language k the sentences that k does not divide; one in 7 has two in English."""
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
