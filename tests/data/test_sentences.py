"""Long texts in chunks: at sentence ends of many scripts, and elsewhere only where it must be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m4.data.sentences import chunks, joined, sentences


@pytest.mark.parametrize(
    "text",
    [
        "One here.|Two there!|Three?",
        'He said "no."|Then (yes!)|left.',
        "It is 3.5 at www.a.org/?b now.|J. Smith and Co. agree.",
        "Wait ... what?!|Yahoo!|answers",  # a space after an exclamation mark is an end
        "一句话。|第二句！|“第三句？”|完",
        "पहला वाक्य।|दूसरा॥",
        "یہ ایک ہے۔|وہ دو ہے؟|ہاں",
        "Առաջին։|Երկրորդ",
        "አንድ።|ሁለት፧",
        "ប្រយោគ។|មួយ",
        "တစ်။|နှစ်",
        "„Nein.“|Ja.",
        "no end at all",
    ],
)
def test_sentences_end_at_the_terminators_of_their_script(text: str) -> None:
    expected = text.split("|")
    spaced = " " if text.isascii() or text[0] in "पیԱአ„" else ""
    assert sentences(spaced.join(expected)) == expected


def test_only_a_sentence_that_does_not_fit_is_cut_and_at_a_space_if_it_has_one() -> None:
    found = chunks("Ab. C" + "d cd" * 5 + ". Gh", lambda text: len(text) <= 8)
    assert found.texts == ["Ab.", "Cd", "cdd cdd", "cdd", "cdd cd.", "Gh"]
    assert found.cut == 1


def test_without_spaces_characters_stay_whole() -> None:
    family = "👨‍👩‍👧"  # one character of five code points
    assert chunks(family * 4, lambda text: len(text) <= 10).texts == [family * 2] * 2
    # Even one is too long: it is cut as well, down to code points.
    assert chunks(family, lambda text: len(text) <= 1).texts == list(family)


@given(st.text(alphabet="ab.。 !é́", max_size=60), st.integers(1, 9))
def test_chunks_are_the_text_but_for_spaces(text: str, most: int) -> None:
    found = chunks(text, lambda chunk: len(chunk) <= most)
    assert "".join(found.texts).replace(" ", "") == text.replace(" ", "")
    assert all(0 < len(chunk) <= most for chunk in found.texts)


def test_chunks_are_put_together_as_the_script_does() -> None:
    assert joined(["Ola.", "", "Adeus."], "gl") == "Ola. Adeus."
    assert joined(["一。", "二。"], "zh") == joined(["一。", "二。"], "ja") == "一。二。"
