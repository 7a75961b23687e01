"""TMX as OPUS publishes it, and what may be wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from m4.data.sources import Pair
from m4.data.sources.tmx import Tmx
from m4.settings import InputError
from tests.data.corpora import tmx_of, write


def test_a_file_a_pair_also_compressed(tmp_path: Path) -> None:
    text = tmx_of("wo", "fr", [Pair(f"wo {n} <b>", f"fr\n{n} TAG") for n in range(3)])
    write(tmp_path / "fr-wo.tmx.gz", text.replace("TAG", "<ph>{1}</ph><hi>é</hi>"))
    write(tmp_path / "en-pt.tmx", tmx_of("EN-US", "pt_br", [Pair("red", "vermelho")]))
    source = Tmx(tmp_path, files="{pair}.tmx", test_every=1000)
    assert source.language_pairs() == ["en-pt", "fr-wo"]
    # Entities of XML are read, a text processor's codes are not, and a line end is a blank.
    wanted = [Pair(f"fr {n} é", f"wo {n} <b>") for n in range(3)]
    assert [*source.pairs("fr-wo", "train")] == wanted
    # The third <tu> starts in line 6 + 2 * 5: a text has a line end, so a unit has five lines.
    assert source.reading.origin == ("fr-wo.tmx.gz", 16)
    assert [*source.pairs("en-pt", "train")] == [Pair("red", "vermelho")]


def test_a_territory_matters_where_there_are_two(tmp_path: Path) -> None:
    text = tmx_of("pt-PT", "pt-BR", [Pair("1", "2")])
    english = '<tuv lang="en"><seg>3</seg></tuv></tu>'
    write(tmp_path / "en-pt_BR.train.tmx", text.replace("</tu>", english))
    assert [*Tmx(tmp_path).pairs("en-pt_BR", "train")] == [Pair("3", "2")]


def test_large_files_are_read_in_pieces(tmp_path: Path) -> None:
    rows = [Pair(f"sentence {n} {'a' * 50}", f"oración {n}") for n in range(9000)]
    write(tmp_path / "en-gl.train.tmx", tmx_of("en", "gl", rows))  # more than a mebibyte
    assert [*Tmx(tmp_path).pairs("gl", "train")] == rows


ONE = tmx_of("en", "gl", [Pair("a", "b")])
ENTITY = '<!DOCTYPE tmx [<!ENTITY e "a">]>'
DAMAGED = {
    # Ten lines: the head's five, an element of four, and the next one without its end.
    "cut off": (ONE.partition("</tu>")[0] + "</tu>\n<tu", "line 10 column 1: .*unclosed token$"),
    "not XML": ("red\troxo\n", r"line 1 column 1: .*syntax error"),
    "closed wrongly": ("<tmx>\n<body>\n</tmx>", r"line 3 column 3: .*mismatched tag"),
    "an entity": (f"{ENTITY}<tmx>&e;</tmx>", "line 1 column .*declares or uses an entity"),
    "an external one": (
        '<!DOCTYPE tmx [<!ENTITY e SYSTEM "file:///etc/passwd">]><tmx>&e;</tmx>',
        "declares or uses an entity",
    ),
    "one of a DTD": ('<!DOCTYPE tmx SYSTEM "a.dtd"><tmx>&e;</tmx>', "declares or uses an entity"),
    "an unknown encoding": ('<?xml version="1.0" encoding="x-y"?><tmx/>', "line 1 .*encoding"),
    "no pairs": ("<tmx></tmx>", "no pairs in it"),
    "another language": (
        tmx_of("en", "fr", [Pair("a", "b")]),
        "line 6: no xml:lang 'gl', there is en",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_line(tmp_path: Path, case: str) -> None:
    text, said = DAMAGED[case]
    write(tmp_path / "en-gl.train.tmx", text)
    with pytest.raises(InputError, match=rf"en-gl\.train\.tmx.*{said}") as error:
        list(Tmx(tmp_path).pairs("gl", "train"))
    assert "\n" not in str(error.value)


def test_a_doctype_alone_is_read(tmp_path: Path) -> None:
    text = ONE.replace("<tmx", '<!DOCTYPE tmx SYSTEM "x.dtd">\n<tmx', 1)
    write(tmp_path / "en-gl.train.tmx", text)
    assert [*Tmx(tmp_path).pairs("gl", "train")] == [Pair("a", "b")]
