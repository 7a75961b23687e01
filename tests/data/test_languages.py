"""The table of languages and the codes that it understands."""

import pytest

from m4.data.languages import (
    LANGUAGES,
    OTHER,
    Language,
    closely_related,
    describe,
    family_of,
    is_english,
    shown_families,
)


def test_the_table_is_whole():
    assert len(LANGUAGES) == 137
    assert list(LANGUAGES)[:3] == ["es", "fr", "de"]
    assert list(LANGUAGES)[-1] == "ce"
    for code, language in LANGUAGES.items():
        assert language.code == code
        assert code.replace("_", "").isalnum()
        assert len(language.iso639_3) == 3
        assert len(language.script) == 4
        assert language.name
        assert language.branch
    assert len({language.name for language in LANGUAGES.values()}) == 137
    # Two scripts are two languages here: sr and sr_Latn, zh and zh_Hant share an ISO code.
    assert len({language.iso639_3 for language in LANGUAGES.values()}) == 135


SPELLINGS = (
    "gl=gl glg=gl srp_Latn=sr_Latn srp_Cyrl=sr cmn_Hans=zh cmn_Hant=zh_Hant kur=ku yue_Hant=yue "
    "zh-Hant=zh_Hant zh_hans=zh sr_latin=sr_Latn tl=fil no=nb iw=he sh=sr_Latn kor_Kore=ko"
)


@pytest.mark.parametrize("both", SPELLINGS.split())
def test_another_spelling_is_the_language_of_the_table(both):
    code, known = both.split("=")
    assert describe(code) is LANGUAGES[known]


@pytest.mark.parametrize(
    ("code", "tag", "name", "script"),
    [
        ("pt_BR", "pt_BR", "Portuguese (Brazil)", "Latn"),
        ("pt-br", "pt_BR", "Portuguese (Brazil)", "Latn"),
        ("zh_TW", "zh_TW", "Chinese (Taiwan)", "Hant"),
        ("sr_Latn_RS", "sr_Latn_RS", "Serbian (Latin, Serbia)", "Latn"),
        ("pa_PK", "pa_PK", "Punjabi (Pakistan)", "Arab"),
        ("tat_Latn", "tt_Latn", "Tatar (Latin)", "Latn"),
        ("uz_cyrillic", "uz_Cyrl", "Uzbek (Cyrillic)", "Cyrl"),
        ("ca_valencia", "ca_valencia", "Catalan (Valencian)", "Latn"),
        ("dv", "dv", "Divehi", "Thaa"),
        ("tlh", "tlh", "Klingon", ""),
        ("en_GB", "en_GB", "English (United Kingdom)", "Latn"),
    ],
)
def test_describe_understands_tags_of_bcp_47(code, tag, name, script):
    found = describe(code)
    assert (found.code, found.name, found.script) == (tag, name, script)


@pytest.mark.parametrize("code", ["toki", "qqq", "my_own", "gl_2", "de_en"])
def test_describe_lets_unknown_codes_name_themselves(code):
    assert describe(code) == Language(code, code, code, "", "")


def test_closely_related_languages_are_of_one_group_or_one_language_in_one_script():
    assert closely_related("bs", ["de", "hr", "bs"]) == ["hr"]
    assert closely_related("sr_Latn_RS", ["de", "hr", "sr", "sr_RS"]) == ["hr"]
    assert closely_related("nb_NO", ["nn", "no", "da"]) == ["nn", "no"]
    assert closely_related("pt_BR", ["pt", "pt_PT", "gl"]) == ["pt", "pt_PT"]
    assert closely_related("zh", LANGUAGES) == closely_related("gl", LANGUAGES) == []
    assert closely_related("gl_2", ["gl_3", "gl"]) == []


def test_english_is_known_under_all_its_tags():
    assert all(map(is_english, ("en", "eng", "en_GB", "en-us", "en_Shaw")))
    assert not any(map(is_english, ("enm", "ang", "gl", "en_x", "qqq")))


def test_a_family_is_found_by_any_code_of_the_language():
    for code in ("glg", "gl", "gl_ES", "lat", "ast"):
        assert family_of(code) == "Romance", code
    for code, family in {
        "cmn_Hans": "Sino-Tibetan", "zh-Hant": "Sino-Tibetan", "srp_Latn": "Slavic",
        "arq": "Afro-Asiatic", "tgl": "Austronesian", "toki": "constructed", "jbo": "constructed",
        "eus": "isolate", "gos": "Germanic", "xx": OTHER,
    }.items():  # fmt: skip
        assert family_of(code) == family, code
    assert [code for code in LANGUAGES if family_of(code) == OTHER] == []


def test_the_largest_families_are_shown():
    found = shown_families(["de", "ja", "ca", "nl", "gl", "es", "xx"], 2)
    assert list(dict.fromkeys(found.values())) == ["Romance", "Germanic", OTHER]
    assert [code for code, family in found.items() if family == OTHER] == ["ja", "xx"]
