import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m4.data.cache.cache import Cache
from m4.data.preprocess import normalised, tag, trim
from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.vocabulary import Vocabulary
from tests.data.corpus import Made

TEXTS = [pair.first for pair in Made({"gl": 400}).pairs("en-gl", "train")]
# Text that NFKC changes, in several scripts; signs that SentencePiece keeps for itself.
WORLD = [
    "医生用面包工作吗？", "！，“你好”", "ทำงานกับขนมปังไหม", "ກຳລັງຊຳລະ",
    "Հայերեն և այլն", "1º, 2ª, ½, x², №5, ™, …", "ﬁn ﷺ Ⅳ ㎏", "शब्द क़", "کتاب‌ها", "a ▁b▁ ⁇ ▅ ░",
]  # fmt: skip
# Every character of Unicode that Python knows, but for controls, surrogates and private use.
EVERY = map(chr, range(sys.maxunicode + 1))
CHARACTERS = [c for c in EVERY if unicodedata.category(c) not in ("Cc", "Cs", "Cn", "Co")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("world") / "v.model"
    vocabulary.train(path, [*WORLD * 9, *TEXTS], 600, ["en", "zh"])
    return Vocabulary(path)


def test_ids_are_those_of_t5_then_tags_then_bytes(tmp_path: Path) -> None:
    made = vocabulary.train(tmp_path / "v.model", TEXTS, 400, ["en", "sr_Latn"])
    trained = Vocabulary(tmp_path / "v.model")
    pieces = [trained._processor.id_to_piece(i) for i in range(7)]
    assert pieces == ["<pad>", "</s>", "<unk>", "▁<2en>", "▁<2sr_Latn>", "<0x00>", "<0x01>"]
    assert trained.languages == ["en", "sr_Latn"]
    assert (trained.tag_id("en"), trained.tag_id("sr_Latn")) == (3, 4)
    assert made["requested_size"] == made["size"] == trained.size == 400
    assert [p.name for p in tmp_path.iterdir()] == ["v.model"]


def test_every_character_comes_back_in_its_normal_form(world: Vocabulary) -> None:
    """In NFC, with spaces of all kinds as one."""
    texts = [*WORLD, *(f"a{c} {c}b  {c}" for c in CHARACTERS)]
    wanted = [" ".join(unicodedata.normalize("NFC", text).split()) for text in texts]
    assert world.decode(world.encode(texts)) == wanted == [*world.normalised(texts)]


@settings(max_examples=300)
@given(
    st.lists(
        st.text(st.sampled_from(CHARACTERS), max_size=9)
        | st.text(st.sampled_from([*"▁⁇▅ <2en>\u00a0\u3000\u202f\u0301\u0e33é½"]), max_size=9)
    )
)
def test_text_of_all_scripts_comes_back(
    world: Vocabulary, made_cache: Cache, texts: list[str]
) -> None:
    for of in (world, made_cache.vocabulary):
        ids = of.encode_targets(texts)
        assert of.decode(ids) == [normalised(text) for text in texts]
        assert all(vocabulary.UNK_ID not in row for row in ids), "bytes stand in for characters"


def test_long_lines_are_trained_on(tmp_path: Path) -> None:
    """Lines above SentencePiece's own limit of 4,192 bytes, and above ours of 16,384 characters."""
    thai = "ทำงานกับขนมปังไหม" * 1000  # 17,000 characters of 3 bytes, without a space
    parts = [thai[n : n + 170] for n in range(0, 17000, 170)]
    for name, lines in (("long", [thai]), ("short", parts)):
        made = vocabulary.train(tmp_path / name, lines, 300, ["en"])
        assert made["characters"] == len({*thai})
    long, short = (Vocabulary(tmp_path / name) for name in ("long", "short"))
    # Two pieces for 17 characters.
    assert len(long.encode([thai])[0]) <= len(short.encode([thai])[0]) <= 2_000
    words = "one two" + " one two" * 3000
    parts = [*vocabulary._lines(words)]
    assert len(parts) > 1
    assert " ".join(parts) == words


def test_decode_ends_at_eos_and_takes_ids_beyond_the_table(made_cache: Cache) -> None:
    v = made_cache.source_vocabulary
    (ids,) = v.encode(["red bird"])
    assert v.decode([[0, *ids, 1, *ids], [*ids, v.size + 3], []]) == ["red bird", "red bird ⁇ ", ""]


def test_what_is_cut_ends_in_a_whole_character(world: Vocabulary) -> None:
    text = "a é漢🙂́ 🙂"  # none of the last has a piece: 3 and 4 bytes a character
    (ids,) = world.encode_targets([text])
    for end in range(len(ids) + 1):
        (cut,) = world.decode([ids[:end]])
        assert text.startswith(cut)
        # A row with eos is what the model wrote.
        (whole,) = world.decode([[*ids[:end], 1]])
        assert whole.rstrip("\ufffd").rstrip() == cut.rstrip()
    assert world.decode([ids]) == [text]


@pytest.mark.parametrize("lines", [1, 3, 20])
def test_tiny_text_gets_the_largest_vocabulary_it_has(tmp_path: Path, lines: int) -> None:
    made = vocabulary.train(tmp_path / "v.model", TEXTS[:lines], 8000, ["en", "gl"])
    assert 3 + 2 + 256 < made["size"] < 8000
    assert made["requested_size"] == 8000
    again = Vocabulary(tmp_path / "v.model")
    assert again.decode(again.encode(TEXTS[:lines])) == TEXTS[:lines]


def test_a_script_of_thousands_of_characters_leaves_room_for_merges(tmp_path: Path) -> None:
    # 3,000 characters, each once, and English; 1,000 - 3 - 1 - 256 = 740 free pieces, half of
    # which may be characters.
    chinese = ["".join(chr(0x4E00 + i) for i in range(n, n + 10)) for n in range(0, 3000, 10)]
    made = vocabulary.train(tmp_path / "v.model", [*TEXTS, *chinese], 1000, ["en"])
    assert made["characters"] == 370
    assert made["size"] <= 1000
    assert made["coverage"] < 0.9
    trained = Vocabulary(tmp_path / "v.model")
    assert trained.decode(trained.encode(chinese)) == chinese
    assert len(trained.encode(["stone"])[0]) == 1


def test_errors(tmp_path: Path, made_cache: Cache) -> None:
    with pytest.raises(ValueError, match=r"train\.size = 270: must be at least 276"):
        vocabulary.train(tmp_path / "v.model", TEXTS, 270, ["en"])
    with pytest.raises(ValueError, match="no text to train a vocabulary on"):
        vocabulary.train(tmp_path / "v.model", ["", " "], 400, ["en"])
    with pytest.raises(ValueError, match="no such vocabulary file"):
        Vocabulary(tmp_path / "v.model")
    written = made_cache.vocabulary.path.read_bytes()
    no_text = written.replace("▁".encode(), b"\xff\xff\xff")
    for content in (b"not a model", b"", no_text):
        (tmp_path / "v.model").write_bytes(content)
        with pytest.raises(ValueError, match="not a SentencePiece model"):
            _ = Vocabulary(tmp_path / "v.model").size
    with pytest.raises(ValueError, match=r"no tag <2eo>; it knows en, gl, pt, sr_Latn"):
        made_cache.vocabulary.tag_id("eo")


def test_trim_always_ends_in_eos() -> None:
    assert trim([5, 6, 7], 10) == [5, 6, 7, 1]
    assert trim([5, 6, 7], 4) == [5, 6, 7, 1]
    assert trim([5, 6, 7], 3) == [5, 6, 1]
    assert trim([], 3) == [1]


def test_a_tag_is_one_id_in_front_of_the_untagged_ids(made_cache: Cache) -> None:
    vocabulary = made_cache.vocabulary
    texts = [pair.second for pair in made_cache.pairs("en-gl", "train")]
    tagged = vocabulary.encode_tagged([tag(text, "en") for text in texts])
    plain = vocabulary.encode_targets(texts)
    assert tagged == [[vocabulary.tag_id("en"), *ids] for ids in plain]


@pytest.mark.parametrize("word", ["<2gl>", "red <2en> bird", "<2gl>bird", "\uff1c2gl\uff1e red"])
def test_a_word_that_looks_like_a_tag_is_text(made_cache: Cache, word: str) -> None:
    vocabulary = made_cache.vocabulary
    (source,) = vocabulary.encode_tagged([tag(word, "gl")])
    (target,) = vocabulary.encode_targets([word])
    assert source == [vocabulary.tag_id("gl"), *target]
    tags = {vocabulary.tag_id(code) for code in vocabulary.languages}
    assert not tags.intersection(target)
    # As any other word: what a model writes is the text again.
    assert vocabulary.decode([target]) == [word]
