import functools

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from m4.eval.metrics import Statistics
from m4.eval.metrics.bleu import bleu
from m4.eval.metrics.chrf import chrf
from m4.eval.scoring import delta, score
from m4.storage.files import read_jsonl, write_jsonl


def write(folder, direction, hypotheses, references, sources=None):
    """Writes translations as `m4 decode` does; sources default to the references."""
    rows = [
        {"source": s, "reference": r, "hypothesis": h}
        for h, r, s in zip(hypotheses, references, sources or references, strict=True)
    ]
    write_jsonl(folder / f"test.{direction}.jsonl", rows)


@pytest.fixture
def systems(tmp_path):
    references = ["3 weeks ago in May", "17 square yards per hour", "the 5 Swiss francs of May"]
    tagged = [f"<2en> {text}" for text in ("hai 3 semanas", "17 iardas", "5 francos suizos")]
    moe = [references[0], "17 square meters per hour", references[2]]
    write(tmp_path / "moe", "gl-en", moe, references, tagged)
    write(tmp_path / "bi", "gl-en", ["3 weeks", "17", "the 5 francs"], references, tagged)
    return [
        score.System("moe", tmp_path / "moe", "moe/config.gin", 1600),
        score.System("bilingual", tmp_path / "bi", {"gl-en": "c/gl.gin"}, {"gl-en": 400}),
    ]


def test_rows_of_every_system_metric_and_subset(systems, tmp_path):
    measured = score.measure(systems, [bleu, chrf])
    subsets = {"en-gl": {"seen": [True, False, True]}}
    rows = score.score_rows(measured, {"gl": 250}, subsets)
    assert [(r["system"], r["metric"], r["subset"]) for r in rows] == [
        (system, metric, subset)
        for system in ("moe", "bilingual", "copy")
        for metric in ("bleu", "chrf")
        for subset in ("all", "seen", "unseen")
    ]
    assert [row["sentences"] for row in rows[:3]] == [3, 2, 1]
    row = rows[0]
    decodes = score.read_decodes(tmp_path / "moe" / "test.gl-en.jsonl")
    expected = BLEU().corpus_score(
        [d.hypothesis for d in decodes], [[d.reference for d in decodes]]
    )
    assert row["score"] == pytest.approx(expected.score, abs=1e-6)
    assert row["config"] == "moe/config.gin"
    assert (row["checkpoint_step"], row["train_pairs"], row["split"]) == (1600, 250, "test")
    bilingual = next(row for row in rows if row["system"] == "bilingual")
    assert (bilingual["config"], bilingual["checkpoint_step"]) == ("c/gl.gin", 400)
    copy = next(row for row in rows if row["system"] == "copy")
    assert (copy["config"], copy["checkpoint_step"]) == (None, None)
    write_jsonl(tmp_path / "scores.jsonl", rows)
    assert read_jsonl(tmp_path / "scores.jsonl") == rows


def exact(hypotheses, references, language, sources, metric="exact", signature="exact match"):
    """Measures the share of sentences that equal the reference, as a user's own metric."""
    counts = [[h == r, 1] for h, r in zip(hypotheses, references, strict=True)]
    return Statistics(metric, np.array(counts, np.int64), share, signature)


def share(sums):
    return 100.0 * sums[..., 0] / sums[..., 1]


def test_rows_of_a_users_metric(systems):
    measured = score.measure(systems, [exact])
    rows = score.score_rows(measured, {"gl": 250})
    assert [(r["system"], r["metric"], r["score"]) for r in rows] == [
        ("moe", "exact", pytest.approx(100 * 2 / 3, abs=1e-6)),
        ("bilingual", "exact", 0.0),
        ("copy", "exact", 0.0),
    ]
    # Any text is a signature, also none.
    assert {row["signature"] for row in rows} == {"exact match|bs:1000|seed:12345"}
    unsigned = score.measure(systems, [functools.partial(exact, signature="")])
    assert score.score_rows(unsigned, {})[0]["signature"] == "bs:1000|seed:12345"
    (row,) = delta.deltas(measured, {"gl": 250}, "exact")
    assert row.delta == pytest.approx(100 * 2 / 3)


def test_a_metric_that_cannot_be_used_is_named(systems):
    def too_few(hypotheses, references, language, sources):
        return exact(hypotheses[:1], references[:1], language, sources)

    def undefined(hypotheses, references, language, sources):
        counts = np.zeros((len(hypotheses), 1), np.int64)
        return Statistics("none", counts, lambda sums: sums[..., 0] * np.nan, "")

    for metrics, message in (
        (
            [too_few],
            r"counts \[3 sentences, .* it returned Statistics\(metric='exact', counts=.*1, 1\]\]",
        ),
        ([exact, exact], "two metrics are called 'exact'"),
        (
            [functools.partial(exact, metric="../exact")],
            r"name of letters.* it returned Statistics\(metric='\.\./exact'",
        ),
        ([undefined], "none of moe, gl-en, all is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            score.score_rows(score.measure(systems, metrics), {})


def test_copy_is_the_source_without_its_tag():
    rows = [score.Decode("<2zh_Hant> 3 weeks ago", "3週前", "?"), score.Decode("no tag", "無", "?")]
    copied = score.measured_of([], {("a", "en-zh_Hant"): rows}, []).decodes["copy", "en-zh_Hant"]
    assert [row.hypothesis for row in copied] == ["3 weeks ago", "no tag"]


def test_marks_must_fit_the_sentences(systems):
    with pytest.raises(ValueError, match=r"'seen' of en-gl marks 2 sentences, moe has decoded 3"):
        score.score_rows(
            score.measure(systems, [bleu, chrf]), {}, {"en-gl": {"seen": [True, False]}}
        )


def test_systems_on_different_test_sets_are_refused(systems, tmp_path):
    write(tmp_path / "other", "gl-en", ["a"], ["b"])
    with pytest.raises(ValueError, match="other test sentences than those of moe"):
        score.measure([*systems, score.System("dense", tmp_path / "other")], [chrf])
