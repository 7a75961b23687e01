"""10,000 corrupted lines of every kind: each counted, none crashes, none reaches training."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m4.data.corpus import CorpusSpec
from m4.data.sources import Pair, Source
from m4.data.sources.jsonl import Jsonl
from m4.data.sources.moses import Moses
from m4.data.sources.reading import lines as reading_lines
from m4.data.sources.reading.lines import Reading, Reason
from m4.data.sources.tsv import Tsv
from tests.data.arrays import tokens as tokens_of

LINES = 10_000
LONG, TOO_LONG = b"poison " * 150_000, "longer than 65536 bytes"  # 1 MB
CARRIAGE_RETURN = "a control character: a carriage return (CR) inside"
LINE_END = "+a Unicode line end (U+2028, U+2029)"
# What must be in no pair, whatever the format.
MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
FORBIDDEN = f"\0\x07\x1b\x85{MARKS}\u2028\u2029\ufeff\r\t"

# Kind -> both sides of a line, and what it is counted as: skipped, or with '+' put right.
KINDS: dict[str, tuple[bytes, bytes, str]] = {
    "NUL": (b"poison %d", b"ve\0neno %d", "a NUL character"),
    "control": (b"poison %d", b"ve\x1bneno %d", "a control character"),
    "C1 control": (b"poison %d", "ve\u0085neno %%d".encode(), "a control character"),
    "carriage return": (b"poi\rson %d", b"veneno %d", CARRIAGE_RETURN),
    "not UTF-8": (b"poison %d", b"vene\xf1o %d", "not UTF-8"),
    "cut UTF-8": (b"poison %d \xe2\x82", b"veneno %d", "not UTF-8"),
    "surrogate in UTF-8": (b"poison %d", b"ven\xed\xa0\x80eno %d", "not UTF-8"),
    "empty English": (b"  ", b"veneno %d", "an empty first side"),
    "empty translation": (b"poison %d", "\u00a0\u3000".encode(), "an empty second side"),
    "RTL": (b"clean %d", f"{MARKS}שלום{MARKS} %d".encode(), "+a mark of writing direction"),
    "BOM": ("\ufeffclean %d".encode(), b"limpo %d", "+a byte order mark"),
    "U+2028": ("clean\u2028%d".encode(), "limpo\u2029%d".encode(), LINE_END),
    "CRLF": (b"clean %d", b"limpo %d\r", "+a CRLF line end"),
    "good": (b"clean %d", b"limpo %d", ""),
}


def filled(side: bytes, number: int) -> bytes:
    return side.replace(b"%%d", b"%d").replace(b"%d", str(number).encode())


def tsv(folder: Path) -> tuple[Source, Counter[str]]:
    kinds = {kind: (e + b"\t" + f, why) for kind, (e, f, why) in KINDS.items()}
    kinds["no tab"] = (b"poison %d", "no tab")
    kinds["tabs"] = (b"poison\tpoison %d\tveneno", "more than one tab")
    kinds["empty"] = (b"", "an empty line")
    return Tsv(folder, on_bad_line="skip"), write(folder / "gl.train.tsv", kinds)


def moses(folder: Path) -> tuple[Source, Counter[str]]:
    # A tab is a blank there.
    kinds = {**KINDS, "tab": (b"clean\t%d", b"limpo\t%d", "+a tab or line end inside")}
    kinds["empty"] = (b"", b"", "an empty first side")
    both = {kind: (e + b"\n" + f, why) for kind, (e, f, why) in kinds.items()}
    expected = write(folder / "both", both)
    lines = (folder / "both").read_bytes().split(b"\n")[:-1]
    # A line without partner is what `write` has put between, the long one: its partner follows.
    (folder / "train.en-gl.en").write_bytes(b"".join(line + b"\n" for line in lines[::2]))
    (folder / "train.en-gl.gl").write_bytes(b"".join(line + b"\n" for line in lines[1::2]))
    return Moses(folder, on_bad_line="skip"), expected


def jsonl(folder: Path) -> tuple[Source, Counter[str]]:
    kinds: dict[str, tuple[bytes, str]] = {
        "not UTF-8": (b'{"en": "poison", "gl": "\xf1"}', "not UTF-8"),
        "BOM": ('{"en": "\ufeffclean %d", "gl": "limpo %d"}'.encode(), "+a byte order mark"),
        "CRLF": (b'{"en": "clean %d", "gl": "limpo %d"}\r', "+a CRLF line end"),
        "empty": (b"", "an empty line"),
        "half": (b'{"en": "poison', "not JSON"),
        "raw control": (b'{"en": "poi\x07son", "gl": "x"}', "not JSON"),
        "raw NUL": (b'{"en": "poi\0son", "gl": "x"}', "not JSON"),
        "nested": (b"[" * 50_000, "not JSON"),
        "no object": (b'["poison", "veneno"]', "not a JSON object"),
        "many digits": (b'{"en": "poison", "gl": ' + b"1" * 5000 + b"}", "not JSON"),
        "number": (b'{"en": "poison", "gl": 3}', "the second side is no text"),
        "no field": (b'{"en": "poison", "pt": "x"}', "no second side"),
        "null": (b'{"en": null, "gl": "veneno"}', "no first side"),
        "lone": (b'{"en": "poison \\ud83d", "gl": "x"}', "a lone surrogate"),
        "pair": (b'{"en": "clean %d \\ud83d\\ude00", "gl": "limpo %d"}', ""),
        "NUL": (b'{"en": "poi\\u0000son", "gl": "x"}', "a NUL character"),
        "control": (b'{"en": "poi\\u001bson", "gl": "x"}', "a control character"),
        "U+2028": (b'{"en": "clean\\u2028%d", "gl": "limpo %d"}', LINE_END),
        "RTL": (b'{"en": "clean %d", "gl": "\\u200flimpo %d"}', "+a mark of writing direction"),
        "line end": (b'{"en": "clean\\n%d", "gl": "limpo\\t%d"}', "+a tab or line end inside"),
        "good": (b'{"en": "clean %d", "gl": "limpo %d"}', ""),
    }
    source = Jsonl(folder, translation_field="{lang}", on_bad_line="skip")
    return source, write(folder / "gl.train.jsonl", kinds)


def write(path: Path, kinds: dict[str, tuple[bytes, str]]) -> Counter[str]:
    """Writes LINES lines of all kinds, three of them 1 MB long; returns the expected counts."""
    expected: Counter[str] = Counter()
    names = sorted(kinds)
    with path.open("wb") as file:
        for number in range(LINES):
            line, why = kinds[names[number % len(names)]]
            if number % 4000 == 1234:
                line, why = LONG + (b"\nx" if path.name == "both" else b""), TOO_LONG
            file.write(filled(line, number) + b"\n")
            expected[why] += 1
    return expected


@pytest.mark.parametrize("make", [tsv, moses, jsonl])
def test_corrupted_lines(make: Callable[[Path], Any], tmp_path: Path) -> None:
    source, expected = make(tmp_path)
    spec = CorpusSpec(source, vocabulary_size=400, lengths={"inputs": 64, "targets": 64})
    made = spec.build(tmp_path / "data")
    # Every line is counted: left out, put right, or good.
    (tally,) = source.reading.tallies.values()
    normalised = {"+" + what: count for what, count in tally.normalised.items()}
    good = expected.pop("")
    assert {**tally.skipped, **normalised} == expected
    kept = good + sum(count for why, count in expected.items() if why.startswith("+"))
    assert sum(1 for _ in source.pairs("en-gl", "train")) == kept
    assert kept + sum(count for why, count in expected.items() if why[0] != "+") == LINES
    # The ledger of the corpus has the same counts; the last stages leave out some of the good ones.
    count = made.ledger().count("en-gl", "train")
    assert count.read == LINES
    from_source = {why: n for why, n in count.dropped.items() if why.startswith("source: ")}
    assert from_source == {f"source: {why}": n for why, n in tally.skipped.items()}
    assert count.kept == count.read - sum(count.dropped.values())
    # None reaches training: neither the cache's text nor its ids have anything of them.
    pairs = list(made.pairs("en-gl", "train"))
    assert 0 < len(pairs) <= kept
    for side in chain.from_iterable(pairs):
        assert not re.search(f"poison|ven|[{FORBIDDEN}]", side)
    for side, texts in zip(("first", "second"), zip(*pairs, strict=True), strict=True):
        flat, offsets = tokens_of(made, "train", side)
        ids = [part.tolist() for part in np.split(np.asarray(flat), offsets[1:-1])]
        assert made.vocabulary.decode(ids) == list(texts)


def test_what_has_no_lines_is_measured_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_lines, "MAX_LINE_BYTES", 10)
    reading = Reading("a.B", "skip")
    with reading.of("x", "x") as tally:
        assert tally.pair(1, "ten bytes.", "äöüäö")
        assert not tally.pair(2, "ten bytes.", "äöüäöü")  # 12 bytes
        assert not tally.pair(3, "eleven chars", "x")
    assert reading.skipped == {("x", "longer than 65536 bytes"): 2}


SAMPLE = "ab é\u00a0\u200c\u3000שा\t\n" + FORBIDDEN + "\ud83d"


@given(*[st.text(st.sampled_from(SAMPLE), max_size=6)] * 2)
def test_the_short_way_is_the_long_one(english: str, translation: str) -> None:
    reading = Reading("a.B", "skip")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_lines, "MAX_LINE_BYTES", 12)
        with reading.of("x", "x") as tally:
            pair = tally.pair(1, english, translation)
        with reading.of("y", "y") as tally:
            long = [tally._sentence(text, s) for text, s in ((english, "E"), (translation, "f"))]
    if any(isinstance(side, Reason) for side in long):
        assert pair is None
        assert sum(reading.skipped.values()) == 1
    else:
        assert pair == tuple(long)
        assert {*reading.tallies["x"].normalised} == tally._notes
        assert not set(FORBIDDEN) & set("".join(pair or ()))


GOOD = [f"good {n}\tbo {n}".encode() for n in range(9)]
BAD = {
    "no tab": b"just English", "more than one tab": b"one\ttwo\tthree", "an empty line": b"",
    "an empty first side": b" \tfoo", "an empty second side": b"foo\t\xc2\xa0 ",
    "not UTF-8": b"good\tm\xe1 codificaci\xf3n", "a NUL character": b"nul\tn\0l",
    "a control character": b"bell\tb\x07ll", "longer than 65536 bytes": b"long " * 20_000 + b"\tz",
}  # fmt: skip


def tsv_of(folder: Path, lines: list[bytes]) -> Tsv:
    (folder / "gl.train.tsv").write_bytes(b"\n".join(lines) + b"\n")
    return Tsv(folder)


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_line_is_an_error_or_skipped_and_counted(tmp_path: Path, reason: str) -> None:
    source = tsv_of(tmp_path, [*GOOD[:4], BAD[reason], *GOOD[4:]])
    with pytest.raises(ValueError, match=rf"gl\.train\.tsv line 5: {reason} .*on_bad_line") as e:
        list(source.pairs("en-gl", "train"))
    assert "\n" not in str(e.value)
    source = Tsv(tmp_path, on_bad_line="skip")
    for _ in range(2):  # a second reading does not count again
        pairs = list(source.pairs("en-gl", "train"))
        assert pairs == [Pair(f"good {n}", f"bo {n}") for n in range(9)]
        assert source.reading.skipped == {("gl.train.tsv", reason): 1}


def test_harmless_dirt_is_put_right_and_counted(tmp_path: Path) -> None:
    joined = "می\u200cخواهم क\u094d\u200dष"
    lines = {
        "\ufeffbyte order mark\tx": Pair("byte order mark", "x"),
        "carriage return\ty\r": Pair("carriage return", "y"),
        "  wide\u202f space \t z\xa0 z ": Pair("wide space", "z z"),
        "right to left\t\u200fשלום\u200e": Pair("right to left", "שלום"),
        "line\u2028separator\tä\u2029ö": Pair("line separator", "ä ö"),
        f"joiners stay\t{joined}": Pair("joiners stay", joined),
    }
    source = tsv_of(tmp_path, [line.encode() for line in lines])
    assert list(source.pairs("en-gl", "train")) == [*lines.values()]
    assert source.reading.skipped == {}
    # One line each, also where it has two marks.
    assert source.reading.tallies["gl.train.tsv"].normalised == {
        "a byte order mark": 1, "a CRLF line end": 1, "a mark of writing direction": 1,
        "a Unicode line end (U+2028, U+2029)": 1,
    }  # fmt: skip


def test_a_file_without_pairs_is_an_error(tmp_path: Path) -> None:
    tsv_of(tmp_path, GOOD)
    (tmp_path / "eo.train.tsv").touch()
    assert list(Tsv(tmp_path).pairs("en-gl", "dev")) == []
    with pytest.raises(ValueError, match=r"eo\.train\.tsv: no pairs"):
        list(Tsv(tmp_path).pairs("en-eo", "train"))


def test_a_folder_called_like_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "gl.train.tsv").mkdir()
    for read in (Tsv.identity, lambda source: list(source.pairs("en-gl", "train"))):
        with pytest.raises(ValueError, match=r"gl\.train\.tsv: not a file but a folder"):
            read(Tsv(tmp_path))
