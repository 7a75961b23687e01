"""The table of languages and the codes that it understands."""

import pytest

from m4.data.languages import CLOSELY_RELATED, LANGUAGES, Language, closely_related, describe


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


def test_direction_of_writing():
    right_to_left = {code for code, language in LANGUAGES.items() if language.rtl}
    assert right_to_left == {"ar", "he", "fa", "ur", "ps", "sd", "ug", "ckb", "yi"}


@pytest.mark.parametrize(
    ("code", "known"),
    [
        ("gl", "gl"),
        ("glg", "gl"),
        ("srp_Latn", "sr_Latn"),
        ("srp_Cyrl", "sr"),
        ("cmn_Hans", "zh"),
        ("cmn_Hant", "zh_Hant"),
        ("kur", "ku"),
        ("yue_Hant", "yue"),
    ],
)
def test_describe_understands_iso_codes(code, known):
    assert describe(code) is LANGUAGES[known]


@pytest.mark.parametrize("code", ["tlh", "tat_Latn", "my_own"])
def test_describe_lets_unknown_codes_name_themselves(code):
    assert describe(code) == Language(code, code, code, "", "", False)


def test_closely_related():
    for code, other in CLOSELY_RELATED.items():
        assert other in closely_related(code, LANGUAGES)
        assert code in closely_related(other, LANGUAGES)
    assert closely_related("bs", ["de", "hr", "bs"]) == ["hr"]
    assert closely_related("gl", LANGUAGES) == []
