"""Other text of a language: gl~lexicon both ways, and gl~bt, which a model wrote, as a source."""

from pathlib import Path

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.directions import SIDES, base_language, split_direction
from m4.data.samplers.shares import Shares
from m4.data.samplers.uniform import uniform
from m4.data.sources.tsv import Tsv
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from tests.data.arrays import tokens as tokens_of
from tests.data.corpus import Made

PAIRS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes text of gl and pt, and pairs of gl~bt and gl~lexicon, one side of which is in test."""
    folder, made = tmp_path_factory.mktemp("other_text"), Made({"gl": 60, "pt": 60})
    for code in ("gl", "pt"):
        for split in ("train", "dev", "test"):
            write(folder / f"{code}.{split}.tsv", [*made.pairs(code, split)])
    more = [*made.pairs("gl", "train")]
    tested = next(iter(made.pairs("gl", "test")))
    write(folder / "gl~bt.train.tsv", [(f"{e} again", f"{t} <bt>") for e, t in more[:PAIRS]])
    write(folder / "gl~lexicon.train.tsv", [("sea", "mar"), ("word", tested.second)])
    return folder


def write(path: Path, pairs: list) -> None:
    path.write_text("".join(f"{english}\t{other}\n" for english, other in pairs), "utf-8")


@pytest.fixture(scope="module", params=[1, 3], ids=["once", "segmentations"])
def cache(folder: Path, request: pytest.FixtureRequest, tmp_path_factory) -> Cache:
    spec = CorpusSpec(Tsv(folder), vocabulary_size=500, segmentations=request.param)
    return spec.build(tmp_path_factory.mktemp("corpus"))


def test_other_text_is_trained_on_alone_and_test_sentences_leave_it(cache: Cache) -> None:
    for code, pairs in (("gl~bt", PAIRS), ("gl~lexicon", 1)):
        assert [cache.size(code, split) for split in ("train", "dev", "test")] == [pairs, 0, 0]
    dropped = cache.ledger().count("en-gl~lexicon", "train").dropped
    assert dropped == {"overlap: second side in test": 1}


def test_marks_are_in_front_of_synthetic_sources_and_nowhere_else(cache: Cache) -> None:
    vocabulary = cache.source_vocabulary
    mark = vocabulary.synthetic_id
    assert vocabulary.pieces[mark] == "▁<bt>"
    assert vocabulary.languages == ["en", "gl", "pt"]
    # A text that has the word is no marked one.
    assert mark not in vocabulary.encode(["<bt> bos días <bt>"])[0]
    flat, offsets = tokens_of(cache, "train", "second")
    rows = sum(cache.size(code, "train") for code in cache.language_pairs())
    ways, own = range(cache.segmentations), cache.rows("gl~bt", "train")
    assert len(offsets) == rows * len(ways) + 1
    starts = [offsets[way * rows + row] for way in ways for row in own]
    assert np.flatnonzero(flat == mark).tolist() == sorted(starts)
    assert mark not in tokens_of(cache, "train", "first")[0]
    pair = next(cache.pairs("gl~bt", "train"))
    (ids,) = vocabulary.encode([pair.second])
    assert flat[offsets[own[0]] :][: len(ids) + 1].tolist() == [mark, *ids]


def test_batches_have_tag_then_mark_and_the_share_that_is_asked_for(cache: Cache) -> None:
    names, share = [*cache.directions], 0.3
    phases = mixture.phases(cache, Shares({"gl~bt-*": share}, uniform))
    stream = Stream(cache, phases=phases, seed=1, batch_rows=16)
    vocabulary, drawn = cache.source_vocabulary, np.zeros(len(names))
    for step in range(40):
        batch = stream.batch(step)
        inputs, of = batch["encoder_input_tokens"], batch["encoder_direction_ids"]
        first = (batch["encoder_positions"] == 0) & (batch["encoder_segment_ids"] > 0)
        for row, place in zip(*np.nonzero(first), strict=True):
            source, target = split_direction(names[of[row, place]])
            assert inputs[row, place] == vocabulary.tag_id(base_language(target))
            assert (inputs[row, place + 1] == vocabulary.synthetic_id) == (source == "gl~bt")
            drawn[of[row, place]] += 1
    assert drawn[names.index("gl~bt-en")] / drawn.sum() == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("mixture", ["english_centric", "from_english", "direct"])
def test_english_of_a_model_is_a_source(mixture: str, tmp_path: Path) -> None:
    made = Made({"gl": 60, "br": 60})
    for code in ("gl", "br"):
        write(tmp_path / f"en-{code}.train.tsv", [*made.pairs(f"en-{code}", "train")])
    # Names of files have the model's English first, whatever the pair is called.
    write(tmp_path / "en~bt-br.train.tsv", [*made.pairs("en-br", "train")][:PAIRS])
    source = Tsv(tmp_path, files="{pair}.{split}.tsv")
    assert source.language_pairs() == ["en-br", "en-gl", "br-en~bt"]
    cache = CorpusSpec(source, vocabulary_size=500, mixture=mixture).build(tmp_path / "data")
    assert "en~bt-br" in cache.directions
    assert "br-en~bt" not in cache.directions
    mark = cache.source_vocabulary.synthetic_id
    first, second = (tokens_of(cache, "train", side)[0].tolist() for side in SIDES)
    # The second side of "br-en~bt" is English.
    assert (first.count(mark), second.count(mark)) == (0, PAIRS)
    assert next(cache.pairs("br-en~bt", "train")).second.isascii()
