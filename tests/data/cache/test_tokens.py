"""Token arrays: separate vocabularies, sampled segmentations, any number of workers."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4.data.cache import corpus_text, tokens
from m4.data.cache.cache import Cache
from m4.data.cache.tokens import whole_factors
from m4.data.cleaning.clean import NOTHING
from m4.data.corpus import CorpusSpec, bilingual
from m4.data.directions import MIXTURES, ROLES, SIDES, Mixture, sides_of
from m4.data.preprocess import normalised
from m4.data.sources import SPLITS
from m4.data.sources.tsv import Tsv
from m4.data.vocabulary import tokenizing
from tests.command_line import contents
from tests.data.arrays import of_text, pairs_of, unpacked
from tests.data.arrays import rows_of as sentences
from tests.data.cache.test_cache import SMALL
from tests.data.corpus import Made


def texts(made: Cache, split: str, side: str) -> list[str]:
    every = [pair for code in made.language_pairs() for pair in made.pairs(code, split)]
    return [getattr(pair, side) for pair in every]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    folder = tmp_path_factory.mktemp("sampled") / "cache"
    source = Made({"gl": 120, "pt": 40})
    return CorpusSpec(source, segmentations=3, sampling_alpha=0.2, **SMALL).build(folder)


def separate(folder: Path, mixture: str, **changed: Any) -> Cache:
    settings = {**SMALL, "target_vocabulary_size": 350, **changed}
    return CorpusSpec(Made({"gl": 120, "pt": 40}), mixture=mixture, **settings).build(folder)


@pytest.fixture(scope="module")
def to_english(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return separate(tmp_path_factory.mktemp("separate"), "to_english")


def test_the_best_segmentation_comes_first_then_others(sampled: Cache) -> None:
    assert sampled.segmentations == 3
    vocabulary = sampled.source_vocabulary
    for side in ("first", "second"):
        rows = sentences(sampled, "train", side)
        assert len(rows) == 3 * 160
        of_side = texts(sampled, "train", side)
        ways = [rows[160 * way : 160 * (way + 1)] for way in range(3)]
        assert ways[0] == vocabulary.encode(of_side)
        assert ways[1] != ways[0] != ways[2] != ways[1]
        for way in ways:
            assert vocabulary.decode(way) == of_side, "every way spells the sentence"
        for split in ("dev", "test"):
            assert sentences(sampled, split, side) == vocabulary.encode(texts(sampled, split, side))
    rows = sentences(sampled, "train", "second")
    for code, row in (("gl", 0), ("pt", 120)):
        assert sampled.rows(code, "train").start == row
        own = [160 * way + r for way in range(3) for r in sampled.rows(code, "train")]
        lengths = [len(rows[r]) for r in own]
        assert sampled.longest(code)["second"] == max(lengths)
        _, mean = sampled.mean_pieces(f"en-{code}")
        assert mean == pytest.approx(np.mean(lengths), abs=1e-3)


def test_a_sampled_way_that_is_too_long_is_the_best_one(tmp_path: Path) -> None:
    # Sentences of one size in a vocabulary that knows their words: the best ways fit easily.
    source = Made({"gl": 80})
    settings = {"vocabulary_size": 600, "segmentations": 4, "sampling_alpha": 0.9}
    wide = CorpusSpec(source, **settings).build(tmp_path / "wide")
    longest = max(len(ids) for side in SIDES for ids in sentences(wide, "dev", side)) + 8
    lengths = {"inputs": longest + 2, "targets": longest + 1}
    narrow = CorpusSpec(source, **settings, lengths=lengths).build(tmp_path / "c")
    assert narrow.size("en-gl", "train") == 80, "none is too long in its best way"
    replaced = 0
    for side in SIDES:
        free, kept = sentences(wide, "train", side), sentences(narrow, "train", side)
        for place, (anywhere, here) in enumerate(zip(free, kept, strict=True)):
            too_long = len(anywhere) > longest
            assert here == (free[place % 80] if too_long else anywhere)
            replaced += too_long
    assert 0 < replaced < 2 * 4 * 80
    assert max(narrow.longest("en-gl").values()) <= longest


# With one vocabulary, the corpus is the same for all mixtures.
@pytest.mark.parametrize(
    ("mixture", "target_size"), [("direct", None), *((each, 350) for each in MIXTURES)]
)
def test_ids_and_token_counts_are_those_of_the_text(
    tmp_path: Path, mixture: Mixture, target_size: int | None
) -> None:
    """Sources with a tag; in NFC; with one vocabulary or two."""
    ways = 2
    for split in SPLITS:
        lines = [f"\ufb01n \u00bd no {n} {split}\t\uff0c\u0e33 num {n}\n" for n in range(30)]
        (tmp_path / f"gl.{split}.tsv").write_text("".join(lines))
    spec = CorpusSpec(
        Tsv(tmp_path), mixture=mixture, target_vocabulary_size=target_size,
        vocabulary_size=350, segmentations=ways, cleaning=NOTHING,
    )  # fmt: skip
    others = [dataclasses.replace(spec, mixture=each).identity() for each in MIXTURES]
    assert others.count(spec.identity()) == (len(MIXTURES) if target_size is None else 1)
    made = spec.build(tmp_path / "c")
    vocabularies = {"source": made.source_vocabulary, "target": made.target_vocabulary}
    assert made.separate == (target_size is not None)
    assert vocabularies["target"].languages == ([] if made.separate else ["en", "gl"])
    counts = {role: np.zeros(of.size, np.int64) for role, of in vocabularies.items()}
    for direction in made.directions:
        into = direction.partition("-")[2]
        for split in SPLITS:
            found = pairs_of(unpacked(made, direction, split))
            ids = [(source, target) for _, source, target in found]
            assert ids == of_text(made, direction, split)
        for role, side in zip(ROLES, sides_of(direction), strict=True):
            rows, of = sentences(made, "train", side, role), vocabularies[role]
            assert of.decode(rows) == ways * [*map(normalised, texts(made, "train", side))]
            counts[role] += np.bincount(np.concatenate(rows), minlength=of.size)
            counts[role][1 if role == "source" else 0] += ways * 30  # eos, or pad in front
        counts["source"][made.vocabulary.tag_id(into)] += ways * 30
    if made.separate:
        for role, wanted in counts.items():
            assert np.load(made.folder / f"token_counts.{role}.npy").tolist() == wanted.tolist()
    else:
        found = np.load(made.folder / "token_counts.npy")
        assert found.tolist() == (counts["source"] + counts["target"]).tolist()


def test_a_vocabulary_is_trained_on_the_text_of_its_role(to_english: Cache) -> None:
    """Translation words of the made-up languages end in g or p; English ones hardly do."""
    english, translation = (texts(to_english, "test", side) for side in ("first", "second"))

    def pieces(vocabulary: Any, of: list[str]) -> int:
        return sum(map(len, vocabulary.encode(of)))

    source, target = to_english.source_vocabulary, to_english.target_vocabulary
    assert pieces(source, translation) < 0.7 * pieces(target, translation)
    assert pieces(target, english) < 0.7 * pieces(source, english)


def test_the_mixture_is_part_of_a_cache_with_two_vocabularies(tmp_path: Path) -> None:
    made = separate(tmp_path / "c", "to_english")
    assert Cache(made.folder).directions == made.directions == ["gl-en", "pt-en"]
    assert separate(tmp_path / "c", "to_english").fingerprint == made.fingerprint
    with pytest.raises(ValueError, match="made for the mixture to_english, not english_centric"):
        Cache(made.folder, "english_centric")
    assert separate(tmp_path / "c", "english_centric").folder != made.folder
    assert not any(sentences(made, "train", "first", "source")), "English is no source"
    # A bilingual baseline has one vocabulary, and its parent's directions.
    small = bilingual(Cache(made.folder), "gl", vocabulary_size=350).build(tmp_path / "gl")
    assert small.directions == ["gl-en"]
    assert not small.separate
    assert small.source_vocabulary is small.target_vocabulary is small.vocabulary


def test_workers_and_blocks_change_nothing(
    tmp_path: Path, sampled: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "BLOCK", 37)
    monkeypatch.setattr(corpus_text, "BLOCK", 51)
    monkeypatch.setattr(tokenizing, "_RANGE_BYTES", 100)
    source = Made({"gl": 120, "pt": 40})
    settings = {**SMALL, "segmentations": 3, "sampling_alpha": 0.2}
    made = CorpusSpec(source, **settings, workers=2).build(tmp_path / "c")
    assert contents(made.folder) == contents(sampled.folder)


def test_a_killed_build_leaves_no_worker_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from m4.data.corpus import CorpusSpec\n"
        "from tests.data.corpus import Made\n"
        "def report(stage, done, total):\n"
        "    if stage == 'tokens':\n"
        "        import multiprocessing\n"
        "        print(*[c.pid for c in multiprocessing.active_children()], flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"spec = CorpusSpec(Made({{'gl': 50}}), workers=2, **{SMALL!r})\n"
        f"spec.build({str(tmp_path / 'c')!r}, progress=report)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120)
    assert done.returncode == -signal.SIGKILL
    workers = [int(pid) for pid in done.stdout.split()]
    assert workers
    deadline = time.monotonic() + 30
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, workers))
    (left,) = (tmp_path / "c").iterdir()
    made = CorpusSpec(Made({"gl": 50}), **SMALL).build(tmp_path / "c")
    assert left.name.startswith(f".{made.fingerprint}.")
    assert [*(tmp_path / "c").iterdir()] == [made.folder]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie, whose status has not been read, is dead too.
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_the_sample_for_a_vocabulary_has_a_fixed_budget(made_cache: Cache) -> None:
    pairs = {code: made_cache.size(code, "train") for code in made_cache.language_pairs()}
    every = {pair: [*made_cache.pairs(pair, "train")] for pair in pairs}

    def drawn(sentences: int, sides: tuple[str, ...], temperature: float) -> list[str]:
        def some(pair: str, rows: np.ndarray) -> tuple[list[str], list[str]]:
            return [every[pair][r].first for r in rows], [every[pair][r].second for r in rows]

        of_pairs = dict.fromkeys(pairs, sides)
        return list(tokens.sample(some, pairs, of_pairs, sentences, temperature))

    # Shares are rounded language by language: at most one off for each of the four.
    for temperature in (1.0, 5.0):
        assert abs(len(drawn(100, SIDES, temperature)) - 100) <= 4
    assert abs(len(drawn(10**9, SIDES, 5.0)) - 2 * 421) <= 4, "what there is"
    for side in SIDES:
        assert {*drawn(10**9, (side,), 1.0)} == {*texts(made_cache, "train", side)}
    few = drawn(60, ("second",), 1.0)
    assert len(set(few)) == len(few), "each once before any comes twice"
    at_5 = drawn(421, ("second",), 5.0)
    own = texts(made_cache, "train", "second")[-31:]  # the smallest language's, of 421
    counted = [at_5.count(text) for text in own]
    assert sum(counted) == round(421 * 31**0.2 / (300**0.2 + 90**0.2 + 31**0.2))
    assert max(counted) - min(counted) <= 1, "as many times over as it needs"


@pytest.mark.parametrize(
    ("mixture", "target_size"),
    [("direct", None), ("any_to_any", None), *((each, 320) for each in MIXTURES)],
)
def test_targets_of_nearly_all_pairs_fit(
    tmp_path: Path, mixture: Mixture, target_size: int | None
) -> None:
    """Against all pairs one by one: at least 99.9% fit, and with a smaller factor fewer do."""
    for code, verbose in (("gl", "longo "), ("el", "ϡ" * 40)):  # the second is spelled in bytes
        lines = [f"x {n} y\t{verbose * (1 + n % 3)}{n}\n" for n in range(60)]
        for split in ("train", "dev", "test"):
            (tmp_path / f"{code}.{split}.tsv").write_text("".join(lines), encoding="utf-8")
    made = CorpusSpec(
        Tsv(tmp_path), mixture=mixture, vocabulary_size=320, target_vocabulary_size=target_size,
        lengths={"inputs": 1024, "targets": 1024}, cleaning=NOTHING,
    ).build(tmp_path / "c")  # fmt: skip
    found = made.manifest["length_factors"]
    assert {*found} >= {*made.directions}
    for direction in made.directions:
        both = zip(*of_text(made, direction, "train"), strict=True)
        lengths = [np.array([*map(len, ids)]) for ids in both]
        factor = found[direction]
        # 99.9% of 60 pairs are all of them; the factor is rounded to three digits.
        assert (lengths[1] <= (factor + 0.001) * lengths[0] + 16).all()
        assert (lengths[1] > (factor - 0.001) * lengths[0] + 16).any()
    if "en-el" in found:
        assert made.length_factors.keys() <= {"el", "gl"}


def test_a_language_has_the_largest_factor_of_its_directions() -> None:
    factors = {"en-gl": 1.4, "gl-en": 2.0, "en-el": 2.001, "el-en": 3.5}
    assert whole_factors(factors, [*factors]) == {"el": 3, "en": 4}
    assert whole_factors(factors, ["en-gl", "gl-en"]) == {}
