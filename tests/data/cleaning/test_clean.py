"""Laws of all stages of cleaning, and of cleanings made of them."""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from m4.data import cleaning
from m4.data.cleaning import CleaningStage, clean
from m4.data.cleaning.chunk import chunks
from m4.data.cleaning.clean import Cleaning
from m4.data.cleaning.script import Script
from m4.data.cleaning.stages import Duplicates, Empty, Identical, Length, LengthRatio
from m4.data.sources import SPLITS
from tests.data.cleaning.cases import Listed, run


def every_stage() -> list[CleaningStage]:
    """Each stage in the folder, at its defaults."""
    for module in pkgutil.iter_modules(cleaning.__path__):
        importlib.import_module(f"m4.data.cleaning.{module.name}")
    kinds = CleaningStage.__subclasses__()
    return [kind() for kind in kinds if kind.__module__.startswith("m4.data.cleaning.")]


STAGES = every_stage()


def messy(seed: int = 0) -> Listed:
    """A corpus with something for every stage."""
    rng = random.Random(seed)
    words = ["casa", "río", "Ａ", "mar", "привет", "漢字", "שלום", "é", "\u200b", "the", "of", "12"]
    words += ["\ufeff", "．"]

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.choice([0, 1, 2, 3, 30])))

    def pairs(n: int) -> list[tuple[str, str]]:
        made = [(sentence(), sentence()) for _ in range(n)]
        same = sentence()
        return [
            *made,
            *rng.choices(made, k=n // 4),
            (same * 50, "x"),
            (f"{same} a b c d", f"{same} a b c d"),
        ]

    return Listed(
        {(c, s): pairs(200 if s == "train" else 30) for c in ("gl", "ru") for s in SPLITS}
    )


def test_all_files_of_the_folder_are_in_thorough() -> None:
    assert {s.name for s in STAGES} == {s.name for s in clean.thorough().stages}
    assert [s.name for s in clean.DEFAULT.stages] == ["normalise", "empty", "duplicates", "overlap"]


@pytest.mark.parametrize(
    "stages", [*([s] for s in STAGES), STAGES], ids=lambda s: "+".join(x.name for x in s)
)
def test_laws_of_stages(
    tmp_path: Path, stages: list[CleaningStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reported = messy(), []
    kept, ledger = run(stages, source, tmp_path, on_drop=lambda *of: reported.append(of))
    assert not [*tmp_path.iterdir()], "nothing is left of the spool"
    for (code, split), pairs in kept.items():
        given, count = source.listed[f"en-{code}", split], ledger.count(f"en-{code}", split)
        assert count.read == len(given)
        assert count.kept == len(pairs)
        assert count.read == count.kept + sum(count.dropped.values())
        if split != "train":
            assert pairs == given, "what a model is tested on stays what it is"
            assert not count.dropped
            assert not count.changed
        listed = [of for of in reported if of[1:3] == (f"en-{code}", split)]
        assert len(listed) == sum(count.dropped.values())
        for why, _, _, number, pair in listed:
            assert 1 <= number <= len(given)
            assert (
                any(pair == example[1:] for example in count.examples[why])
                or len(count.examples[why]) == 5
            )
    for stage in stages:
        assert json.loads(json.dumps(stage.identity())) == stage.identity()
    # The same whatever the chunks.
    monkeypatch.setattr(clean, "chunks", lambda pairs: chunks(pairs, 7))
    again, same = run(stages, source, tmp_path)
    assert again == kept
    assert same.as_json() == ledger.as_json()


def test_a_corpus_that_is_clean_stays_as_it_is(tmp_path: Path) -> None:
    sentences = [f"This is sentence number {n}." for n in range(60)]
    pairs = [
        (s, unicodedata.normalize("NFC", f"Esta é a oración número {n}."))
        for n, s in enumerate(sentences)
    ]
    source = Listed({("gl", "train"): pairs[:58], ("gl", "test"): pairs[58:]})
    kept, ledger = run([*clean.thorough().stages], source, tmp_path)
    assert kept["gl", "train"] == pairs[:58]
    assert not ledger.reasons("dropped")
    assert not ledger.reasons("flagged")


def test_cleaning_names_its_stages_and_settings() -> None:
    made = Cleaning([Length(7), Empty()])
    assert made.identity() == {
        "order": ["length", "empty"],
        "length": {"most_characters": 7},
        "empty": {},
    }
    with pytest.raises(ValueError, match=r"stages = \['empty', 'empty'\]: must be stages of"):
        Cleaning([Empty(), Empty()])
    assert [s for s in clean.thorough([Length(7)]).stages if s.name == "length"] == [Length(7)]
    assert len(clean.thorough([Length(7)]).stages) == len(STAGES)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Length(0), r"Length\.most_characters = 0: must be a whole number from 1"),
        (lambda: LengthRatio(bound=0.5), r"LengthRatio\.bound = 0\.5: must be a number from 1"),
        (lambda: Duplicates(by="both"), r"Duplicates\.by = 'both': must be one of pair, first"),
        (lambda: Script(most_latin=2), r"Script\.most_latin = 2: must be a number from 0 to 1"),
        (lambda: Identical(name_words=True), r"Identical\.name_words = True: must be a whole"),
    ],
)
def test_wrong_settings_are_refused_at_once(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        make()
    assert "\n" not in str(error.value)
