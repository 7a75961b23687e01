"""Laws for every metric, against sacreBLEU itself."""

import random

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

from m4.eval.metrics import bootstrap
from m4.eval.metrics.bleu import bleu, tokenizer
from m4.eval.metrics.chrf import chrf

METRICS = [(bleu, BLEU), (chrf, CHRF)]
WORDS = ["3", "weeks", "ago", ",", "in", "17", "yards", "and", "the", "May", "18", "per", "hour"]


def corpus(noise: float, sentences: int = 60, seed: int = 0) -> tuple[list[str], list[str]]:
    """Hypotheses with a share of words replaced, and their references."""
    rng = random.Random(seed)
    references = [" ".join(rng.choices(WORDS, k=rng.randint(1, 14))) for _ in range(sentences)]
    rng = random.Random(f"{seed} {noise}")
    hypotheses = [
        " ".join(w if rng.random() > noise else rng.choice(WORDS) for w in reference.split())
        for reference in references
    ]
    return hypotheses, references


@pytest.mark.parametrize(("metric", "sacre"), METRICS)
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_score_interval_and_signature_are_sacrebleus(metric, sacre, noise):
    hypotheses, references = corpus(noise)
    its = sacre()
    expected = its.corpus_score(hypotheses, [references], n_bootstrap=1000)
    score = bootstrap.score(metric(hypotheses, references, "en"))
    assert score.value == pytest.approx(expected.score, abs=1e-9)
    assert score.signature == str(its.get_signature())
    # sacreBLEU sums in float32 and prints the half-width.
    assert (score.high - score.low) / 2 == pytest.approx(expected._ci, abs=1e-4)
    assert score.low <= score.value <= score.high
    assert score.sentences == 60


@pytest.mark.parametrize(("metric", "sacre"), METRICS)
@pytest.mark.parametrize("noise", [0.3, 0.34, 0.6])
def test_paired_difference_is_sacrebleus(metric, sacre, noise):
    good, references = corpus(0.3)
    bad, _ = corpus(noise, seed=0)
    bad[0] = "the"
    test = PairedTest(
        [("bad", bad), ("good", good)], {"m": sacre()}, [references], test_type="bs", n_samples=1000
    )
    _, results = test()
    baseline, system = next(rows for name, rows in results.items() if name != "System")
    assert isinstance(baseline, Result)
    assert isinstance(system, Result)
    difference = bootstrap.paired_difference(
        metric(good, references, "en"), metric(bad, references, "en")
    )
    assert difference.delta == pytest.approx(system.score - baseline.score, abs=1e-9)
    assert difference.p_value == system.p_value
    assert difference.low < difference.delta < difference.high
    assert difference.replicates.shape == (1000,)


@pytest.mark.parametrize(("metric", "_"), METRICS)
def test_the_difference_changes_sign_when_systems_are_swapped(metric, _):
    good, references = corpus(0.2)
    bad, _unused = corpus(0.5)
    a, b = metric(good, references, "en"), metric(bad, references, "en")
    one, other = bootstrap.paired_difference(a, b), bootstrap.paired_difference(b, a)
    np.testing.assert_array_equal(one.replicates, -other.replicates)
    assert (one.low, one.high, one.p_value) == (-other.high, -other.low, other.p_value)


@pytest.mark.parametrize(("metric", "_"), METRICS)
def test_a_system_does_not_differ_from_itself(metric, _):
    """Their p is 1, where sacreBLEU's formula gives its smallest value."""
    statistics = metric(*corpus(0.3), "en")
    same = bootstrap.paired_difference(statistics, statistics)
    assert (same.delta, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(("metric", "_"), METRICS)
def test_subset_is_scored_as_if_alone(metric, _):
    hypotheses, references = corpus(0.3)
    keep = [i % 3 == 0 for i in range(60)]
    alone = metric(hypotheses[::3], references[::3], "en")
    assert bootstrap.score(metric(hypotheses, references, "en").select(keep)) == bootstrap.score(
        alone
    )


@pytest.mark.parametrize(("metric", "_"), METRICS)
def test_extremes(metric, _):
    _hypotheses, references = corpus(0.0)
    assert metric(references, references, "en").value() == pytest.approx(100)
    assert metric([""] * 60, references, "en").value() == 0
    assert metric(["ж"] * 60, references, "en").value() == 0


@pytest.mark.parametrize(("metric", "sacre"), METRICS)
@pytest.mark.parametrize("hypothesis", ["", "a", "a b", "c b a", "a b c d e f"])
def test_degenerate_sentences_score_as_sacrebleu(metric, sacre, hypothesis):
    references = ["a b c d e"]
    expected = sacre().corpus_score([hypothesis], [references]).score
    assert metric([hypothesis], references, "en").value() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "languages"),
    [
        ("zh", "zh zh_Hant yue wuu cmn cmn_Hans cmn_Hant yue_Hant lzh zho"),
        # OPUS names Chinese by territory, in either case; '_2' is what a user may make of it.
        ("zh", "zh_CN zh_TW zh_HK zh_cn zh_tw zh_Hans_CN zh_Hant_TW zh_2 zh_TW_2 zh_Hant_2 yue_HK"),
        ("ja-mecab", "ja jpn ja_JP jpn_2 jpn_Jpan_2"),
        ("ko-mecab", "ko kor ko_KR ko_KR_2"),
        ("char", "th tha lo lao km khm my mya bo th_TH jv_Java"),
        ("13a", "en gl glg de ar he hi ta am vi sr_Latn srp_Cyrl uzb_Cyrl ja_Latn toki xx"),
        ("13a", "pt_BR pt_BR_2 ja_Latn_2 zh_Latn_CN xx_JP xx_Xyz"),
    ],
)
def test_tokenizer_of_the_target_language(name, languages):
    assert {language: tokenizer(language) for language in languages.split()} == dict.fromkeys(
        languages.split(), name
    )


def test_signature_names_the_tokenizer():
    for language, text, wanted in [
        ("ja", "3週間前", "tok:ja-mecab-"), ("ko", "3주 전", "tok:ko-mecab-"),
        ("zh_Hant", "3週前", "tok:zh|"), ("th", "3 สัปดาห์ที่ผ่านมา", "tok:char|"),
        ("gl", "hai 3 semanas", "tok:13a|"),
    ]:  # fmt: skip
        assert wanted in bootstrap.score(bleu([text], [text], language)).signature


def test_missing_tokenizer_package_is_an_error(monkeypatch):
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    with pytest.raises(ValueError, match=r"pip install 'sacrebleu\[ja\]'"):
        bleu(["日本"], ["日本"], "ja")


def test_large_test_sets_are_resampled_in_blocks(monkeypatch):
    counted = chrf(*corpus(0.3), "en")
    whole = bootstrap.resample(counted)
    monkeypatch.setattr(bootstrap, "_BLOCK", 60 * 7)
    monkeypatch.setattr(bootstrap, "_KEPT_SENTENCES", 0)
    np.testing.assert_array_equal(bootstrap.resample(counted), whole)
