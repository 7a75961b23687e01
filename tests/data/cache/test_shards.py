"""Sentences that several pairs of languages have are stored once; arrays come in shards."""

import io
import tempfile
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m4.data.cache import shards
from m4.data.cache.cache import Cache
from m4.data.cache.shards import PairShards, SentenceShards, write_pairs, write_sentences
from m4.data.cleaning.chunk import Numbers, digests
from m4.data.cleaning.clean import NOTHING
from m4.data.corpus import CorpusSpec
from m4.data.directions import pair_of
from m4.data.sources import SPLITS
from m4.data.sources.aligned import Aligned
from m4.data.stream.stream import Stream
from m4.data.vocabulary import Ragged
from m4.settings import InputError
from tests.data.arrays import rows_of
from tests.data.corpora import WRITERS, texts_of
from tests.data.corpus import Made
from tests.data.test_beam import Shuffled, opened, spec

CODES = ("en", "fr", "gl", "wo")
SPEC: dict[str, Any] = {"vocabulary_size": 400, "cleaning": NOTHING, "workers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes four languages line by line; some lines come twice, one is too long in French."""
    folder = tmp_path_factory.mktemp("aligned")
    for split, number in (("train", 90), ("dev", 8), ("test", 8)):
        (folder / split).mkdir()
        for code in CODES:
            words = ("the", "of the") if code == "en" else (f"{code}a", f"{code}o")
            about = [f"{split}{n % 85} {words[1]} {n * n % 17}" for n in range(number)]
            lines = [f"{words[0]} {what}" for what in about]
            lines[3] += " wapi toku" * (80 * (code == "fr" and split == "train"))
            text = "".join(f"{line}\n" for line in lines)
            (folder / split / code).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return CorpusSpec(Aligned(str(folder)), **SPEC).build(tmp_path_factory.mktemp("c"))


def test_a_sentence_is_stored_once_however_many_pairs_have_it(made: Cache, folder: Path) -> None:
    assert made.language_pairs() == [pair_of("-".join(two)) for two in combinations(CODES, 2)]
    for split in SPLITS:
        stored = 0
        for code in CODES:
            text = (made.folder / "text" / f"{split}.{code}.txt").read_text(encoding="utf-8")
            lines = text.splitlines()
            wanted = dict.fromkeys((folder / split / code).read_text().splitlines())
            assert lines == [line for line in wanted if len(line) < 500], "in their order, once"
            assert made.manifest["sentences"][split][code] == len(lines)
            stored += len(lines)
        ids = made.sentences(split).take(np.arange(stored)).ids
        assert len(made.sentences(split)) == stored
        assert len(ids) == len(np.load(made.folder / f"{split}.tokens.00000.npy"))
    # 6 pairs of 90 lines: without one line in the 3 pairs of French.
    assert [made.size(pair, "train") for pair in made.language_pairs()] == [89, 90, 90, 89, 89, 90]


def test_pairs_are_the_source_s_by_text_and_by_ids(made: Cache, folder: Path) -> None:
    """Against the source, without sentences that are stored once."""
    source = Aligned(str(folder))
    for split in SPLITS:
        names = made.language_pairs()
        every = [pair for name in names for pair in source.pairs(name, split)]
        wanted = [pair for pair in every if max(map(len, pair)) < 500]
        assert [pair for name in names for pair in made.pairs(name, split)] == wanted
        for side, texts in zip(("first", "second"), zip(*wanted, strict=True), strict=True):
            assert rows_of(made, split, side) == made.vocabulary.encode(list(texts))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Cache:
    """Builds a corpus in shards of 256 bytes."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 256)
    return CorpusSpec(Aligned(str(folder)), **SPEC).build(tmp_path)


@pytest.mark.parametrize("layout", ["packed", "single"])
@pytest.mark.parametrize("parts", [1, 2])
def test_batches_are_those_of_one_shard(made: Cache, small: Cache, layout: str, parts: int) -> None:
    assert len([*small.folder.glob("train.tokens.*")]) > 15
    assert len([*small.folder.glob("train.pairs.*")]) > 5
    one, many = (Stream(cache, batch_rows=4, layout=layout, seed=1) for cache in (made, small))
    for step in (0, 1, 7, 900):
        for part in range(parts):
            wanted, found = (stream.batch(step, (part, parts)) for stream in (one, many))
            for key, array in wanted.items():
                np.testing.assert_array_equal(found[key], array, key)


def test_only_shards_that_are_needed_are_mapped(
    small: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of two pairs of languages out of six never opens the others' files."""
    opened: set[str] = set()
    path_of = small.path

    def path(name: str, done: Callable[[], object]) -> Path:
        opened.add(name)
        return path_of(name, done)

    monkeypatch.setattr(small, "path", path)
    stream = Stream(small, ["en-fr", "fr-en"], batch_rows=4)
    for step in range(100):
        stream.batch(step)
    sizes = small.manifest["sentences"]["train"]
    # English and French are the first two languages.
    needed = {*small.sentences("train").names(np.arange(sizes["en"] + sizes["fr"]))}
    assert {name for name in opened if ".pairs." not in name} == needed
    assert len(needed) < 2 * len([*small.folder.glob("train.tokens.*")])


def blocks(sentences: list[list[int]], size: int) -> Iterator[Ragged]:
    for start in range(0, len(sentences), size):
        yield Ragged.of(sentences[start : start + size])


@given(
    st.lists(st.lists(st.integers(1, 999), max_size=9), max_size=40),
    st.integers(1, 20),
    st.integers(4, 20).map(lambda half: 2 * half),
)
def test_any_sentences_in_any_shards(
    sentences: list[list[int]], size: int, shard_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(shards, "SHARD_BYTES", shard_bytes)
        folder = Path(name)
        firsts = write_sentences(folder, "train", blocks(sentences, size), np.uint16)
        assert write_sentences(folder, "again", blocks(sentences, 1), np.uint16) == firsts
        numbers = np.arange(2 * len(sentences), dtype=np.uint32).reshape(-1, 2)
        rows = write_pairs(folder, "train", np.array_split(numbers, size))
        store = SentenceShards(folder, "train", firsts)
        pairs = PairShards(folder, "train", rows)
        assert len(store) == len(pairs) == len(sentences)
        order = np.random.default_rng(0).permutation(len(sentences))
        assert pairs.take(order).tolist() == numbers[order].tolist()
        assert store.take(order).rows() == [sentences[n] for n in order]
        # The law of shards: where the first id of a sentence would be in equal parts.
        starts = np.cumsum([0, *map(len, sentences)])[:-1]
        number = np.searchsorted(firsts[0], np.arange(len(sentences)), side="right") - 1
        assert number.tolist() == [start // (shard_bytes // 2) for start in starts.tolist()]
        for path in folder.glob("*.npy"):
            np.save(whole := io.BytesIO(), np.load(path))
            assert path.read_bytes() == whole.getvalue()


@given(st.lists(st.lists(st.sampled_from("abcdefghij")), max_size=30))
def test_numbers_are_those_of_a_dictionary(chunks: list[list[str]]) -> None:
    numbers, known = Numbers(), {}
    for chunk in chunks:
        wanted = [known.setdefault(text, len(known)) for text in chunk]
        found, new = numbers(digests(chunk))
        assert found.tolist() == wanted
        assert [chunk[place] for place in new.tolist()] == [*known][len(known) - len(new) :]
        assert numbers.count == len(known)


def test_more_sentences_than_there_are_numbers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = WRITERS["tsv"](tmp_path / "text", texts_of(Made({"gl": 20}, held_out=4)))
    monkeypatch.setattr("m4.data.cleaning.chunk.MOST_SENTENCES", 19)
    for engine in (None, opened(Shuffled("direct", [], 1), tmp_path / "shards")):
        with pytest.raises(InputError, match=r"^en: more than 19 different sentences"):
            spec(lambda: source).build(tmp_path / "corpus", engine=engine)
