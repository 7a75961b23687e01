"""Laws for every metric, against sacreBLEU itself."""

import functools
import hashlib
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest, Result

from m4.eval.metrics import bootstrap
from m4.eval.metrics.bleu import bleu, tokenizer
from m4.eval.metrics.chrf import chrf
from m4.eval.metrics.chrfpp import chrfpp
from m4.eval.metrics.exact_match import exact_match
from m4.eval.metrics.spbleu import spbleu
from m4.eval.metrics.ter import ter

METRICS = [(bleu, BLEU), (chrf, CHRF), (chrfpp, functools.partial(CHRF, word_order=2)), (ter, TER)]
WORDS = ["3", "weeks", "ago", ",", "in", "17", "yards", "and", "the", "May", "18", "per", "hour"]


def corpus(noise: float, sentences: int = 60, seed: int = 0) -> tuple[list[str], list[str]]:
    """Returns hypotheses with a share of words replaced, and their references."""
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
    printed = json.loads(expected.format(width=9, signature="a:b", is_json=True))
    half = printed.get("confidence_var", 0.0)  # none where every resample scores 0
    assert (score.high - score.low) / 2 == pytest.approx(half, abs=1e-4)
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


@pytest.mark.parametrize(("metric", "sacre"), METRICS)
@pytest.mark.parametrize("hypothesis", ["", "a", "a b", "c b a", "a b c d e f"])
def test_degenerate_sentences_score_as_sacrebleu(metric, sacre, hypothesis):
    references = ["a b c d e"]
    expected = sacre().corpus_score([hypothesis], [references]).score
    assert metric([hypothesis], references, "en").value() == pytest.approx(expected, abs=1e-9)


# Texts where the parts of a metric could differ: punctuation, scripts, odd white space, nothing.
TEXTS = [
    "(Hi) there, \u201cyou\u201d -- see: 3,5-fold...", "\u65e5\u672c\u8a9e \u306e", "", " ", "!",
    "a\u2028b\u00a0c", "An A a", "the\u0301 cafe\u0301 costs $5.00 .", "3 weeks ago", "weeks 3 ago",
]  # fmt: skip


def several_references(seed: int = 1) -> tuple[list[str], list[tuple[str, ...]]]:
    """Returns hypotheses with three references each: two are noisy, some equally good."""
    hypotheses, first = corpus(0.4, seed=seed)
    more = [corpus(noise, seed=seed)[0] for noise in (0.2, 0.7)]
    rng = random.Random(seed)
    hypotheses += rng.choices(TEXTS, k=40)
    columns = [first, *more]
    columns = [[*column, *rng.choices(TEXTS, k=40)] for column in columns]
    return hypotheses, list(zip(*columns, strict=True))


@pytest.mark.parametrize(("metric", "sacre"), METRICS)
def test_several_references_of_a_sentence(metric, sacre):
    hypotheses, references = several_references()
    its = sacre()
    expected = its.corpus_score(
        hypotheses, [list(column) for column in zip(*references, strict=True)]
    )
    found = metric(hypotheses, references, "en")
    assert found.value() == pytest.approx(expected.score, abs=1e-9)
    assert found.signature == str(its.get_signature())
    assert "nrefs:3" in found.signature
    varying = [several[: 1 + i % 3] for i, several in enumerate(references)]
    columns = [[several[i] if i < len(several) else None for several in varying] for i in range(3)]
    expected = its.corpus_score(hypotheses, columns)
    found = metric(hypotheses, varying, "en")
    assert found.value() == pytest.approx(expected.score, abs=1e-9)
    assert found.signature == str(its.get_signature())
    assert "nrefs:var" in found.signature


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    """Puts a tiny SentencePiece model where sacreBLEU looks for FLORES's."""
    folder = tmp_path_factory.mktemp("sacrebleu") / "models"
    folder.mkdir()
    (folder / "text").write_text("\n".join([*corpus(0.0)[1], *TEXTS]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "m"), vocab_size=80,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    for name in ("sacrebleu_tokenizer_spm.model", "flores200sacrebleuspm"):
        (folder / name).write_bytes((folder / "m.model").read_bytes())
    return folder.parent


@pytest.mark.parametrize("count", [1, 3])
def test_scores_are_those_of_the_sacrebleu_command(spm, tmp_path, count):
    hypotheses, references = several_references()
    # Lines of a file: a text with a line end in it would be two.
    hypotheses = [text.replace("\u2028", "") for text in hypotheses]
    columns = [
        [text.replace("\u2028", "") for text in column] for column in zip(*references, strict=True)
    ]
    columns = columns[:count]
    names = [str(tmp_path / name) for name in ("hyp", *map(str, range(count)))]
    for name, texts in zip(names, [hypotheses, *columns], strict=True):
        with open(name, "w", encoding="utf-8") as file:
            file.write("".join(f"{text}\n" for text in texts))
    model = str(spm / "models" / "m.model")
    digest = hashlib.sha256((spm / "models" / "m.model").read_bytes()).hexdigest()[:8]
    flores101 = functools.partial(spbleu, model=model, tokenizer="flores101")
    for metric, options in [
        (bleu, ["-m", "bleu"]), (chrf, ["-m", "chrf"]), (ter, ["-m", "ter"]),
        (chrfpp, ["-m", "chrf", "--chrf-word-order", "2"]),
        (functools.partial(spbleu, model=model), ["-m", "bleu", "--tokenize", "flores200"]),
        (flores101, ["-m", "bleu", "--tokenize", "flores101"]),
    ]:  # fmt: skip
        command = [sys.executable, "-m", "sacrebleu", *names[1:], "-i", names[0], "-w", "9"]
        said = subprocess.run(
            [*command, *options], env={**os.environ, "SACREBLEU": str(spm)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        expected = json.loads(said.stdout)
        found = metric(hypotheses, list(zip(*columns, strict=True)), "en")
        assert f"{found.value():.9f}" == f"{expected['score']:.9f}"
        assert found.signature.replace(f"[{digest}]", "") == expected["signature"]


def test_exact_match_is_the_share_of_equal_texts():
    found = exact_match(["a", "b ", "C", ""], [("x", "a"), ("b",), ("c",), (" ",)], "en")
    assert found.value() == 75
    assert found.signature == "nrefs:var|case:mixed|space:stripped"


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


def test_large_test_sets_are_resampled_in_blocks(monkeypatch):
    counted = chrf(*corpus(0.3), "en")
    whole = bootstrap.resample(counted)
    monkeypatch.setattr(bootstrap, "_BLOCK", 60 * 7)
    monkeypatch.setattr(bootstrap, "_KEPT_SENTENCES", 0)
    np.testing.assert_array_equal(bootstrap.resample(counted), whole)


def test_holm():
    """Sorted .005 .01 .03 .04 times 4 3 2 1 is .02 .03 .06 .04, and none is below one before it."""
    assert bootstrap.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert bootstrap.holm([0.6, 0.7]) == [1.0, 1.0]
    assert bootstrap.holm([]) == []


def test_the_normal_p_value():
    """At 1.959964 standard errors the two-sided p of a normal distribution is 5%."""
    replicates = np.array([-1.0, 1.0])
    assert bootstrap.normal_p_value(1.959964, replicates) == pytest.approx(0.05, abs=1e-6)
    assert bootstrap.normal_p_value(3.0, np.zeros(5)) == 1.0
