"""Equal text has equal ids, whichever door it comes in by."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from etils import epath
from hypothesis import example, given
from hypothesis import strategies as st

from m4.data.cache.cache import Cache
from m4.data.cleaning import normalise
from m4.data.cleaning.chunk import chunks
from m4.data.cleaning.clean import Cleaning
from m4.data.cleaning.normalise import Normalise
from m4.data.cleaning.overlap import Overlap
from m4.data.corpus import CorpusSpec
from m4.data.sources.tsv import Tsv
from m4.eval.decoding import translate as decoded_lines
from m4.eval.decoding.decode import Translations
from m4.eval.decoding.score_references import Scored
from m4.eval.decoding.settings import Decoding
from m4.eval.decoding.testsets import Portion
from m4.eval.decoding.translate import Translator
from m4.eval.text import Output, Text
from m4.jobs.decoding import testsets
from m4.jobs.decoding.testsets import PortionDecoder
from m4.jobs.decoding.text import missing_lines
from m4.settings import InputError
from tests.data.arrays import tokens as tokens_of

# All characters that cleaning removes or replaces, and two that become others in NFC.
INVISIBLE = [c for c in map(chr, range(sys.maxunicode + 1)) if normalise._ANY.match(c)]
# A pair with one of these is not trained on; U+000A and U+000D end a line.
LEFT_OUT = [c for c in INVISIBLE if c < " " or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff"]
CHARACTERS = [c for c in INVISIBLE if c not in LEFT_OUT] + ["\u0301", "\u2126"]
WORDS = [f"the b{c}ird sees{c} {c}the e{c} {c} red stone ק{c} ខ{c}{c}" for c in CHARACTERS]
ENGLISH = [f"{words} {number}" for number, words in enumerate(WORDS)]
GALICIAN = [f"{words[::-1]} {number}" for number, words in enumerate(WORDS)]
CLEANING = Cleaning((Normalise(),))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    folder = tmp_path_factory.mktemp("doors")
    lines = [f"{one}\t{other}\n" for one, other in zip(ENGLISH, GALICIAN, strict=True)]
    for split in ("train", "dev", "test"):
        (folder / f"gl.{split}.tsv").write_text("".join(lines), encoding="utf-8")
    spec = CorpusSpec(Tsv(folder), vocabulary_size=350, cleaning=CLEANING)
    return spec.build(folder / "data")


def trained_on(made: Cache, side: str) -> list[list[int]]:
    """Returns the ids that the model trains on."""
    flat, offsets = tokens_of(made, "train", side)
    return [row.tolist() for row in np.split(flat, offsets[1:-1])]


def ids_of(made: Cache, tagged: list[str]) -> list[list[int]]:
    return [ids[1:] for ids in made.vocabulary.encode_tagged(tagged)]


def test_dev_and_test_sets(made: Cache) -> None:
    for side in ("first", "second"):
        wanted = trained_on(made, side)
        for split in ("dev", "test"):
            flat, offsets = tokens_of(made, split, side)
            assert [row.tolist() for row in np.split(flat, offsets[1:-1])] == wanted
    pairs = Portion("test").pairs(made)["en-gl"]
    assert made.vocabulary.encode([source for source, _ in pairs]) == trained_on(made, "first")
    targets = [reference for _, reference in pairs]
    assert made.vocabulary.encode_targets(targets) == trained_on(made, "second")


def test_lines_of_users_and_of_the_api(made: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    begun: list[str] = []

    def translations(_trained: Any, tagged: list[str], **m: Any) -> list[Any]:
        given.extend(tagged)
        begun.extend(m["prefixes"])
        return [Translations([""], [0.0])] * len(tagged)

    monkeypatch.setattr(decoded_lines, "translations", translations)
    model: Any = None
    ready = Translator(model, None, made.vocabulary, normalise=CLEANING.normalise)
    ready.candidates(ENGLISH, "gl", prefix=GALICIAN)
    assert ids_of(made, given) == trained_on(made, "first")
    for line in GALICIAN:
        one = dataclasses.replace(ready, decoding=Decoding(prefix=line))
        one.candidates(["the bird"], "gl")
    wanted = trained_on(made, "second")
    assert made.vocabulary.encode_targets(begun) == [*wanted, *wanted]


def test_files_that_are_decoded_and_scored(
    made: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = tmp_path / "en", tmp_path / "gl"
    for path, lines in zip(paths, (ENGLISH, GALICIAN), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    output = Output(Text(epath.Path(paths[0]), "en"), "gl", None, whole=len(ENGLISH))
    sources = [line.source for line in missing_lines([output], CLEANING.normalise)]
    assert made.vocabulary.encode(sources) == trained_on(made, "first")

    model: Any = None
    ready = Translator(model, None, made.vocabulary, normalise=CLEANING.normalise)
    scored: list[list[str]] = []
    monkeypatch.setattr(testsets, "loaded", lambda _: (ready, {}))
    monkeypatch.setattr(
        testsets,
        "score_references",
        lambda *a, **_: scored.extend(a[1:3]) or [Scored(0.0, 1, 0.0)] * len(a[1]),
    )
    assert len([*testsets.score_files(model, *paths, "gl")]) == len(ENGLISH)
    assert ids_of(made, scored[0]) == trained_on(made, "first")
    assert made.vocabulary.encode_targets(scored[1]) == trained_on(made, "second")


def test_files_and_sources_of_overlap(made: Cache, tmp_path: Path) -> None:
    """Training text without any of the characters is the text of files that have them."""
    (tmp_path / "en").write_text("".join(f"{line}\n" for line in ENGLISH), encoding="utf-8")
    for split in ("train", "test"):
        (tmp_path / f"gl.{split}.tsv").write_text(
            "".join(f"{CLEANING.normalise(line)}\tx {split}\n" for line in ENGLISH)
        )
    source = Tsv(tmp_path)
    for by in ({"files": {"set": {"en": str(tmp_path / "en")}}}, {"sources": {"set": made}}):
        check = Overlap(sides=["first"], **by).open(["en-gl"])("en-gl", "train")  # pyright: ignore
        (chunk,) = chunks(source.pairs("en-gl", "train"))
        assert callable(check)
        assert check(chunk).drop["first side in set"].all()


def test_a_test_set_of_its_own_is_read_as_training_text() -> None:
    corpus = SimpleNamespace(cleaning=CLEANING)
    decoder: Any = SimpleNamespace(
        portion=Portion("news"), experiment=SimpleNamespace(data=SimpleNamespace(corpus=corpus))
    )

    def same(tagged: Any, directions: Any) -> Any:
        return [*tagged]

    translate: Any = PortionDecoder._normalised(decoder, cast(Any, same))
    expected = [f"<2gl> {CLEANING.normalise(words)}" for words in WORDS]
    assert translate([f"<2gl> {words}" for words in WORDS], []) == expected
    assert expected != [f"<2gl> {words}" for words in WORDS]


@given(st.text(st.sampled_from([*INVISIBLE, *"ae ק\u0301\u200d\u0e01"]), max_size=9))
@example("\u206a\u200c")  # a joiner behind a mark that goes
def test_normalising_twice_is_normalising_once(text: str) -> None:
    once = CLEANING.normalise(text)
    assert CLEANING.normalise(once) == once


@pytest.mark.parametrize("lines", [b"one\rtwo\rthree\r", b"one\ntwo\rthree\n"])
def test_a_lone_carriage_return_is_one_line(
    made: Cache, tmp_path: Path, lines: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text"
    path.write_bytes(lines)
    number = lines[: lines.index(b"\r")].count(b"\n") + 1
    says = rf"line {number}: a control character: a carriage return \(CR\) inside"
    with pytest.raises(InputError, match=says):
        Text(epath.Path(path), "text").checked()
    with pytest.raises(InputError, match=says):
        Overlap(files={"set": {"en": str(path)}}).open(["en-gl"])
    model: Any = None
    ready = Translator(model, None, made.vocabulary)
    with pytest.raises(InputError, match=says):
        ready.candidates(lines.decode().split("\n"), "gl")
    (tmp_path / "gl.train.tsv").write_bytes(b"\r".join([b"red\troxo"] * 3))
    with pytest.raises(InputError, match=r"gl\.train\.tsv line 1: a control character: a carriage"):
        list(Tsv(tmp_path).pairs("en-gl", "train"))
