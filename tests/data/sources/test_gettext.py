import io
from pathlib import Path

import pytest
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po as babels_read_po

from m4.data.sources import SPLITS, Pair
from m4.data.sources.detect import detect
from m4.data.sources.gettext import Gettext, placeholders, strip_mnemonics
from tests.data.corpora import write

HEADER = r"""# Galician translation.
msgid ""
msgstr ""
"Project-Id-Version: made\n"
"POT-Creation-Date: some day\n"
"Language: gl\n"
"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\n"
"Content-Type: text/plain; charset=UTF-8\n"
"""

# Every kind of entry that catalogues have.
PO = (
    HEADER
    + r"""
#: main.c:1
msgid "Good morning"
msgstr "Bos días"

#. A comment.
msgctxt "menu"
msgid "Open"
msgstr "Abrir"

msgctxt "state"
msgid "Open"
msgstr "Aberto"

msgid ""
"Two lines\n"
"and a \"quote\", a tab\tand a \\"
msgstr ""
"Dúas liñas\n"
"e unha «cita», un tab\te unha \\"

#, fuzzy
#| msgid "Good night"
msgid "Good evening"
msgstr "Boas noites"

msgid "Not translated"
msgstr ""

#, c-format
msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d ficheiro"
msgstr[1] "%d ficheiros"

#, c-format
msgid "%s of %s"
msgstr "%2$s de %1$s"

#, c-format
msgid "%d of %s"
msgstr "%d de %d"

msgid "_Save as"
msgstr "G_ardar como"

msgid "100 % of the R&D"
msgstr "O 100 % da I+D"

#~ msgid "Obsolete"
#~ msgstr "Obsoleto"

#~| msgid "Before"
#~ msgid "Obsolete too"
#~ msgstr "Obsoleto tamén"
"""
)
# Python's gettext wants a rule for plural forms, Babel a date.
FILLED_IN = PO.replace("some day", "2026-01-01 00:00+0000").replace(
    "nplurals=INTEGER; plural=EXPRESSION", "nplurals=2; plural=(n != 1)"
)
KEPT = [
    Pair("Good morning", "Bos días"), Pair("Open", "Abrir"), Pair("Open", "Aberto"),
    Pair('Two lines and a "quote", a tab and a \\', "Dúas liñas e unha «cita», un tab e unha \\"),
    Pair("%s of %s", "%2$s de %1$s"), Pair("Save as", "Gardar como"),
    Pair("100 % of the R&D", "O 100 % da I+D"),
]  # fmt: skip


def catalogue(folder: Path, text: str = PO, **options) -> Gettext:  # type: ignore
    write(folder / "gl.po", text)
    return Gettext(folder, **options)


def pairs(source: Gettext) -> list[Pair]:
    return [pair for split in SPLITS for pair in source.pairs("en-gl", split)]


def test_what_is_kept_and_what_is_counted(tmp_path: Path) -> None:
    source = catalogue(tmp_path)
    assert sorted(pairs(source)) == sorted(KEPT)
    assert source.reading.skipped == {
        ("gl.po", "fuzzy"): 1, ("gl.po", "not translated"): 1, ("gl.po", "plural forms"): 1,
        ("gl.po", "placeholders that differ"): 1, ("gl.po", "obsolete"): 2,
    }  # fmt: skip
    assert source.reading.tallies["gl.po"].normalised == {"a tab or line end inside": 1}


def test_options(tmp_path: Path) -> None:
    kept = pairs(catalogue(tmp_path, placeholders="keep", mnemonics="keep"))
    assert Pair("%d of %s", "%d de %d") in kept
    assert Pair("_Save as", "G_ardar como") in kept
    dropped = pairs(catalogue(tmp_path, placeholders="drop"))
    assert not [pair for pair in dropped if "%s" in pair.first]
    assert Pair("100 % of the R&D", "O 100 % da I+D") in dropped


def test_mo_has_the_same_pairs_as_po(tmp_path: Path) -> None:
    lines = [line for line in FILLED_IN.split("\n") if not line.startswith("#~")]
    path = tmp_path / "gl" / "LC_MESSAGES" / "made.mo"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        write_mo(file, babels_read_po(io.StringIO("\n".join(lines))))
    found = detect(str(tmp_path))
    assert (found.name, found.files) == ("gettext.Gettext", "{lang}/LC_MESSAGES/*.mo")
    source = Gettext(tmp_path, files=found.files)
    assert sorted(pairs(source)) == sorted(KEPT)
    # What is fuzzy or not translated is not compiled at all.
    assert source.reading.skipped == {
        ("gl/LC_MESSAGES/made.mo", "plural forms"): 1,
        ("gl/LC_MESSAGES/made.mo", "placeholders that differ"): 1,
    }
    write(path.with_suffix(".po"), PO)  # then the MO file is not read
    both = Gettext(tmp_path, files="{lang}/LC_MESSAGES/*")
    assert sorted(pairs(both)) == sorted(KEPT)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('msgid "a"\nmsgstr "b"\nnonsense\n', 3),
        ('msgid "a"\nmsgid_plural "b"\nmsgstr[x] "c"\n', 3),
        ('msgid "a"\n\nmsgid "b"\nmsgstr "c"\n', 1),
        ('msgid ""\nmsgstr "charset=NONE-1\\n"\n', 1),
    ],
)
def test_what_is_no_catalogue_is_one_bad_line(tmp_path: Path, text: str, line: int) -> None:
    source = catalogue(tmp_path, text)
    with pytest.raises(ValueError, match=rf"gl\.po line {line}: no catalogue, .*on_bad_line"):
        list(source.pairs("en-gl", "train"))
    source = catalogue(tmp_path, text, on_bad_line="skip")
    assert pairs(source) == []
    assert sum(source.reading.skipped.values()) == 1


def test_bytes_that_are_no_catalogue(tmp_path: Path) -> None:
    (tmp_path / "gl.mo").write_bytes(b"no MO file at all, really")
    source = Gettext(tmp_path, files="{lang}.mo")
    with pytest.raises(ValueError, match=r"gl\.mo line 1: no catalogue, not an MO file"):
        list(source.pairs("en-gl", "train"))
    (tmp_path / "pt.po").write_bytes(b'msgid "a"\nmsgstr "\xf1"\n')
    with pytest.raises(ValueError, match=r"pt\.po line 2: no catalogue, not utf-8"):
        list(Gettext(tmp_path).pairs("en-pt", "train"))


def test_other_charsets_and_english_variants(tmp_path: Path) -> None:
    text = PO.replace("UTF-8", "ISO-8859-1")
    (tmp_path / "gl.po").write_bytes(text.encode("latin-1"))
    for variant in ("en", "en_GB", "en@shaw"):
        write(tmp_path / f"{variant}.po", PO)
    source = Gettext(tmp_path)
    assert source.language_pairs() == ["en-gl"]
    assert Pair("Good morning", "Bos días") in pairs(source)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("%s and %s", {"%s": 2}),
        ("%2$s and %1$s", {"%s": 2}),
        ("%(name)s is %.2f %% full", {"%(name)s": 1, "%.2f": 1}),
        ("%1 of %2 in %L3", {"%1": 1, "%2": 1, "%L3": 1}),
        ("{0} {name} {}", {"{0}": 1, "{name}": 1, "{}": 1}),
        ("100 % of 50%", {}),
    ],
)
def test_placeholders(text: str, found: dict[str, int]) -> None:
    assert placeholders(text) == found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("_Open", "A_brir"), ("Open", "Abrir")),
        (("&File...", "ファイル (&F)..."), ("File...", "ファイル...")),
        *((same, same) for same in (
            ("R&D", "I&D"), ("Save &amp; quit", "Gardar &amp; saír"), ("_Open", "Abrir"),
            ("set file_name", "pon file_name"), ("_A _B", "_A _B"), ("_Open", "&Abrir"),
        )),
    ],
)  # fmt: skip
def test_mnemonics(before: tuple[str, str], after: tuple[str, str]) -> None:
    assert strip_mnemonics(*before) == after
