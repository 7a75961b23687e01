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
    "an empty English side": b" \tfoo",
    "an empty foreign side": b"foo\t\xc2\xa0 ",
    "not UTF-8": b"good\tm\xe1 codificaci\xf3n",
    "a NUL character": b"nul\tn\0l",
}


def write(folder: Path, lines: list[bytes], name: str = "gl.train.tsv") -> Tsv:
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return Tsv(folder)


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_line_of_ten_is_an_error_with_file_and_line(tmp_path: Path, reason: str) -> None:
    source = write(tmp_path, [*GOOD[:4], BAD[reason], *GOOD[4:]])
    with pytest.raises(ValueError, match=rf"gl\.train\.tsv line 5: {reason} .*on_bad_line") as e:
        list(source.pairs("gl", "train"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_line_can_be_skipped_and_is_counted(tmp_path: Path, reason: str) -> None:
    write(tmp_path, [*GOOD[:4], BAD[reason], *GOOD[4:]])
    source = Tsv(tmp_path, on_bad_line="skip")
    for _ in range(2):  # a second reading does not count again
        pairs = list(source.pairs("gl", "train"))
        assert pairs == [Pair(f"good {n}", f"bo {n}") for n in range(9)]
        assert source.skipped == {("gl.train.tsv", reason): 1}
    assert source.warnings() == [f"{tmp_path / 'gl.train.tsv'}: 1 lines skipped: {reason}"]


def test_harmless_dirt_is_cleaned(tmp_path: Path) -> None:
    source = write(
        tmp_path,
        [
            b"\xef\xbb\xbfbyte order mark\tx",
            b"carriage return\ty\r",
            b"  wide\xe2\x80\xaf space \t z\xc2\xa0 z ",
            "right to left\t\u200fשלום\u200e".encode(),
            b"long " * 200_000 + b"\tz",
        ],
    )
    pairs = list(source.pairs("gl", "train"))
    assert pairs[0] == Pair("byte order mark", "x")
    assert pairs[1] == Pair("carriage return", "y")
    assert pairs[2] == Pair("wide space", "z z")
    assert pairs[3].foreign == "\u200fשלום\u200e"
    assert len(pairs[4].english) == 999_999


def test_languages_and_missing_files(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "pt.train.tsv")
    source = write(tmp_path, GOOD, "gl.train.tsv")
    assert source.languages() == ["gl", "pt"]
    assert list(source.pairs("gl", "dev")) == []
    with pytest.raises(ValueError, match=r"eo\.train\.tsv: no such file; .* of gl, pt"):
        list(source.pairs("eo", "train"))
    (tmp_path / "eo.train.tsv").touch()
    with pytest.raises(ValueError, match=r"eo\.train\.tsv: no pairs"):
        list(source.pairs("eo", "train"))


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such folder \(tsv\.Tsv\.folder\)"):
        Tsv(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"'ignore': must be 'fail' or 'skip'"):
        Tsv(tmp_path, on_bad_line="ignore")


def test_identity_is_the_content(tmp_path: Path) -> None:
    before = write(tmp_path, GOOD).identity()
    assert write(tmp_path, GOOD).identity() == before
    changed = write(tmp_path, [*GOOD[:-1], b"good 8\tbo 9"]).identity()
    assert changed != before
    assert Tsv(tmp_path, "skip").identity() != changed
