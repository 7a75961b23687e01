"""Laws of all stages of cleaning, and of cleanings made of them; their ledger adds up."""

import importlib
import json
import pkgutil
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from m4.data import cleaning
from m4.data.cleaning import CleaningStage, clean
from m4.data.cleaning.chunk import chunks
from m4.data.cleaning.clean import Cleaning
from m4.data.cleaning.ledger import ANY, Ledger
from m4.data.cleaning.stages import Empty, Length
from m4.data.corpus import CorpusSpec
from m4.data.sources import Pair
from m4.data.sources.reading.lines import Reading
from tests.data.cleaning.cases import Listed, run

# Each stage in the folder, at its defaults.
for module in pkgutil.iter_modules(cleaning.__path__):
    importlib.import_module(f"m4.data.cleaning.{module.name}")
KINDS = CleaningStage.__subclasses__()
STAGES = [kind() for kind in KINDS if kind.__module__.startswith("m4.data.cleaning.")]


def messy(seed: int = 0) -> Listed:
    """Returns a corpus with text for every stage to change or drop."""
    rng = random.Random(seed)
    words = ["casa", "río", "Ａ", "mar", "привет", "漢字", "שלום", "é", "\u200b", "the", "of", "12"]
    words += ["\ufeff", "．"]

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.choice([0, 1, 2, 3, 30])))

    def pairs(n: int) -> list[tuple[str, str]]:
        made = [(sentence(), sentence()) for _ in range(n)]
        same = sentence()
        odd = (same * 50, "x"), (f"{same} a b c d", f"{same} a b c d")
        return [*made, *rng.choices(made, k=n // 4), *odd]

    sizes = {"train": 200, "dev": 30, "test": 30}
    return Listed({(c, s): pairs(n) for c in ("gl", "ru") for s, n in sizes.items()})


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
        for why, _, _, number, _ in listed:
            assert 1 <= number <= len(given)
            assert why in count.dropped
    for stage in stages:
        assert json.loads(json.dumps(stage.identity())) == stage.identity()
    # The same whatever the chunks.
    monkeypatch.setattr(clean, "chunks", lambda pairs: chunks(pairs, 7))
    again, same = run(stages, source, tmp_path)
    assert again == kept
    assert same.as_json() == ledger.as_json()


def test_a_corpus_that_is_clean_stays_as_it_is(tmp_path: Path) -> None:
    sentences = [f"This is sentence number {n}." for n in range(60)]
    pairs = [(s, f"Esta é a oración número {n}.") for n, s in enumerate(sentences)]
    source = Listed({("gl", "train"): pairs[:58], ("gl", "test"): pairs[58:]})
    kept, ledger = run([*clean.thorough().stages], source, tmp_path)
    assert kept["gl", "train"] == pairs[:58]
    assert not ledger.reasons("dropped")
    assert not ledger.reasons("flagged")


def test_cleaning_names_its_stages_and_settings() -> None:
    made = Cleaning([Length(7), Empty()])
    settings = {"length": {"most_characters": 7}, "empty": {}}
    assert made.identity() == {"order": ["length", "empty"], **settings}
    with pytest.raises(ValueError, match=r"stages = \['empty', 'empty'\]: must be stages of"):
        Cleaning([Empty(), Empty()])
    assert [s for s in clean.thorough([Length(7)]).stages if s.name == "length"] == [Length(7)]
    assert len(clean.thorough([Length(7)]).stages) == len(STAGES)


class OneFile(Listed):
    """Source in one file, whose lines are counted whenever it is read."""

    def __init__(self, pairs: dict) -> None:
        super().__init__(pairs)
        self.reading = Reading("OneFile", "skip")

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        yield from super().pairs(language, split)
        with self.reading.of(f"{split}.good", f"{split}.good"):
            pass
        lines = {("all.jsonl", "not JSON"): 5, (f"{language}.only", "no tab"): 2}
        for (file, reason), count in lines.items():
            with self.reading.of(file, file) as tally:
                tally.skipped[reason] = count


def test_lines_of_a_file_of_several_languages_are_counted_under_a_star(tmp_path: Path) -> None:
    source = OneFile({("gl", "train"): [("a", "b")], ("pt", "train"): [("c", "d")]})
    kept, ledger = run([], source, tmp_path)
    # all.jsonl was read for both languages and all splits, gl.only for all splits of one.
    assert ledger.count(ANY, ANY).as_json() == {
        "read": 5, "kept": 0, "dropped": {"source: not JSON": 5}}  # fmt: skip
    assert [*ledger.counts[ANY]] == [ANY], "nothing of files without such lines"
    assert ledger.count("en-gl", ANY).dropped == {"source: no tab": 2}
    assert ledger.count("en-gl", "train").as_json() == {"read": 1, "kept": 1}
    total = ledger.total()
    assert (total.read, total.kept, sum(total.dropped.values())) == (11, 2, 9)
    assert source.reading.skipped == {("all.jsonl", "not JSON"): 5, ("en-gl.only", "no tab"): 2,
                              ("en-pt.only", "no tab"): 2}  # fmt: skip
    left_out = "9 of 11 training pairs left out: source: not JSON: 5; source: no tab: 4"
    assert ledger.summary() == [left_out]
    assert kept["gl", "train"] == [("a", "b")]


def test_a_language_that_is_cleaned_away_names_the_stages(tmp_path: Path) -> None:
    source = Listed({("ru", "train"): [("a", "b")] * 3})
    with pytest.raises(ValueError, match="en-ru has no training pairs: all 3 are dropped: script:"):
        CorpusSpec(source, vocabulary_size=320, cleaning=clean.thorough()).build(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_ledger_that_does_not_add_up_is_a_mistake() -> None:
    """test_cleaning_report.py has the way to JSON and back."""
    ledger = Ledger({"empty": {"a": 1}})
    count = ledger.count("en-gl", "train")
    count.read = count.kept = 9
    count.drop("empty: first side", 4)
    ledger.check()
    count.kept += 1
    with pytest.raises(AssertionError):
        ledger.check()
