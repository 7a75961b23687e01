from __future__ import annotations

from pathlib import Path

import pytest

from m4.data.sources import Pair
from m4.data.sources.tsv import Tsv

GOOD = [f"good {n}\tbo {n}".encode() for n in range(9)]
BAD = {
    "no tab": b"just English",
    "more than one tab": b"one\ttwo\tthree",
    "an empty line": b"",
    "an empty first side": b" \tfoo",
    "an empty second side": b"foo\t\xc2\xa0 ",
    "not UTF-8": b"good\tm\xe1 codificaci\xf3n",
    "a NUL character": b"nul\tn\0l",
    "a control character": b"bell\tb\x07ll",
    "longer than 65536 bytes": b"long " * 20_000 + b"\tz",
}


def write(folder: Path, lines: list[bytes], name: str = "gl.train.tsv") -> Tsv:
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return Tsv(folder)


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_line_is_an_error_or_skipped_and_counted(tmp_path: Path, reason: str) -> None:
    source = write(tmp_path, [*GOOD[:4], BAD[reason], *GOOD[4:]])
    with pytest.raises(ValueError, match=rf"gl\.train\.tsv line 5: {reason} .*on_bad_line") as e:
        list(source.pairs("en-gl", "train"))
    assert "\n" not in str(e.value)
    source = Tsv(tmp_path, on_bad_line="skip")
    for _ in range(2):  # a second reading does not count again
        pairs = list(source.pairs("en-gl", "train"))
        assert pairs == [Pair(f"good {n}", f"bo {n}") for n in range(9)]
        assert source.reading.skipped == {("gl.train.tsv", reason): 1}


def test_harmless_dirt_is_put_right_and_counted(tmp_path: Path) -> None:
    source = write(
        tmp_path,
        [
            b"\xef\xbb\xbfbyte order mark\tx",
            b"carriage return\ty\r",
            b"  wide\xe2\x80\xaf space \t z\xc2\xa0 z ",
            "right to left\t\u200fשלום\u200e".encode(),
            "line\u2028separator\tä\u2029ö".encode(),
            "joiners stay\tمی\u200cخواهم क\u094d\u200dष".encode(),
        ],
    )
    assert list(source.pairs("en-gl", "train")) == [
        Pair("byte order mark", "x"),
        Pair("carriage return", "y"),
        Pair("wide space", "z z"),
        Pair("right to left", "שלום"),
        Pair("line separator", "ä ö"),
        Pair("joiners stay", "می\u200cخواهم क\u094d\u200dष"),
    ]
    assert source.reading.skipped == {}
    # One line each, also where it has two marks.
    assert source.reading.tallies["gl.train.tsv"].normalised == {
        "a byte order mark": 1,
        "a CRLF line end": 1,
        "a mark of writing direction": 1,
        "a Unicode line end (U+2028, U+2029)": 1,
    }


def test_a_file_without_pairs_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "gl.train.tsv")
    (tmp_path / "eo.train.tsv").touch()
    assert list(Tsv(tmp_path).pairs("en-gl", "dev")) == []
    with pytest.raises(ValueError, match=r"eo\.train\.tsv: no pairs"):
        list(Tsv(tmp_path).pairs("en-eo", "train"))


def test_a_folder_called_like_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "gl.train.tsv").mkdir()
    for read in (Tsv.identity, lambda source: list(source.pairs("en-gl", "train"))):
        with pytest.raises(ValueError, match=r"gl\.train\.tsv: not a file but a folder"):
            read(Tsv(tmp_path))
