from m4.data.families import OTHER, family_of, shown
from m4.data.languages import LANGUAGES


def test_a_family_is_found_by_any_code_of_the_language():
    for code in ("glg", "gl", "gl_ES", "lat", "ast"):
        assert family_of(code) == "Romance", code
    for code, family in {
        "cmn_Hans": "Sino-Tibetan", "zh-Hant": "Sino-Tibetan", "srp_Latn": "Slavic",
        "arq": "Afro-Asiatic", "tgl": "Austronesian", "toki": "constructed", "jbo": "constructed",
        "eus": "isolate", "gos": "Germanic", "xx": OTHER,
    }.items():  # fmt: skip
        assert family_of(code) == family, code


def test_every_language_of_the_embedded_corpus_has_a_family():
    assert [code for code in LANGUAGES if family_of(code) == OTHER] == []


def test_the_largest_families_are_shown():
    found = shown(["de", "ja", "ca", "nl", "gl", "es", "xx"], 2)
    assert list(dict.fromkeys(found.values())) == ["Romance", "Germanic", OTHER]
    assert [code for code, family in found.items() if family == OTHER] == ["ja", "xx"]
