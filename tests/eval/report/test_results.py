import base64
import hashlib
import html.parser
import re

import pytest

from m4.eval.decoding.settings import DEFAULTS
from m4.eval.report import page
from m4.eval.report.page import SCRIPT, Background, language_tag
from m4.eval.report.results import draw, write_results
from m4.eval.scoring.by_step import read_rows, replace_rows, rows_by_step, said
from m4.eval.scoring.delta import from_plain
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import System
from m4.storage.files import read_jsonl, write_jsonl

ATTACK = '<script>alert("x")</script><img src=https://example.org/a.png onerror=x>'
TRAIN = {"pt": 4000, "gl": 250, "he": 150}


class Outline(html.parser.HTMLParser):
    """Elements that are open, tags and attributes that were seen; fails on bad nesting."""

    VOID = frozenset({"meta", "br", "img", "input", "source"})

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *attribute) for attribute in attrs]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    english = [f"{n} Swiss francs per hour on May {n}" for n in range(1, 21)]
    for language in TRAIN:
        translation = [f"{n} francos suízos por hora o {n} de maio" for n in range(1, 21)]
        if language == "he":
            translation = [f"{n} פרנקים שווייצריים לשעה" for n in range(1, 21)]
        for source, target, texts, wanted in (
            (language, "en", translation, english),
            ("en", language, english, translation),
        ):
            for system, keep in (("moe", 30), ("bilingual", 14)):
                hypotheses = [text[:keep] for text in wanted]
                hypotheses[3] = ATTACK
                rows = [
                    {"source": s, "reference": r, "hypothesis": h}
                    for s, r, h in zip(texts, wanted, hypotheses, strict=True)
                ]
                write_jsonl(folder / system / f"test.{source}-{target}.jsonl", rows)
    config = folder / "operative.gin"
    config.write_text(f"# {ATTACK}\ntrain.steps = 1675\n", encoding="utf-8")
    background = Background(
        title=f"A run {ATTACK}",
        corpus=f"Controlled language.\n\n{ATTACK}",
        facts={"date": "2026-01-02", ATTACK: ATTACK},
        configs={ATTACK: config},
        curves={ATTACK: [{"step": step, "nll": 9.0 / (step + 1)} for step in range(9)]},
        sampling={"gl": 0.25},
        epochs={"gl": 41.0},
    )
    written = write_results(
        folder / "out",
        [System(name, folder / name, f"{name}.gin", 7) for name in ("moe", "bilingual")],
        DEFAULTS.metrics,
        TRAIN,
        {f"en-{language}": {"seen": [n % 2 == 0 for n in range(20)]} for language in TRAIN},
        background,
        levels=ResourceLevels(min_test_sentences=20),
        samples=20,
    )
    return written, written.html.read_text(encoding="utf-8")


def test_files(made):
    written, _ = made
    names = sorted(path.name for path in written.html.parent.iterdir())
    assert names == [
        "delta_bleu.png", "delta_bleu.svg",
        "deltas.jsonl", "rates.jsonl", "report.html", "scores.jsonl",
    ]  # fmt: skip
    # 3 systems with copy, 6 directions, 2 metrics, 3 subsets.
    scores = read_jsonl(written.scores)
    assert len(scores) == 3 * 6 * 2 * 3
    by = {(r["system"], r["direction"], r["metric"]): r["score"] for r in scores
          if r["subset"] == "all"}  # fmt: skip
    rows = read_jsonl(written.deltas)
    assert {row["metric"] for row in rows} == {"bleu", "chrf"}
    for row in rows:
        at = row["direction"], row["metric"]
        wanted = by["moe", *at] - by["bilingual", *at]
        assert row["delta"] == pytest.approx(wanted, abs=1e-5)


def test_everything_is_escaped_and_nothing_is_fetched(made):
    _, text = made
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script == SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'\">" in text
    assert "&lt;script&gt;" in text
    outline = Outline()
    outline.feed(text)
    outline.close()
    assert outline.open == []
    assert "link" not in outline.tags
    for tag, name, value in outline.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "srcset", "href", "xlink:href"):
            assert value.startswith(("data:image/png;base64,", "#")), (tag, name)
    assert "default-src 'none'" in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "@import" not in text


def test_the_numbers_are_those_of_the_rows(made):
    written, text = made
    for row in [*written.rows, *written.averages]:
        delta = f"<b>{row.delta:+.1f}</b>".replace("-", "−")
        bounds = f"[{row.low:+.1f}, {row.high:+.1f}]".replace("-", "−")
        assert re.search(re.escape(delta) + r"\s*<small>" + re.escape(bounds), text)
    signatures = {row["signature"] for row in read_jsonl(written.scores)}
    assert len(signatures) == 2
    for signature in signatures:
        assert signature in text


def test_tags_of_languages():
    codes = ("zh_Hant", "glg", "srp_Latn", "xx_yy")
    assert [*map(language_tag, codes)] == ["zh-Hant", "gl", "sr-Latn", "xx-yy"]


def test_same_files_same_bytes(made, tmp_path):
    written, _ = made
    folder = written.html.parent.parent
    systems = [System(name, folder / name) for name in ("moe", "bilingual")]
    one, two = (write_results(tmp_path / name, systems, DEFAULTS.metrics, TRAIN) for name in "ab")
    for name in ("html", "scores", "deltas", "rates"):
        assert getattr(one, name).read_bytes() == getattr(two, name).read_bytes()
    assert one.drawn
    assert two.drawn
    assert one.deltas
    for first, second in zip(one.drawn, two.drawn, strict=True):
        assert first.read_bytes() == second.read_bytes()
    # From the rows alone, without hypotheses.
    rows = [row for row in from_plain(read_jsonl(one.deltas)) if row.metric == "bleu"]
    again = draw(rows, tmp_path / "again")
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in one.drawn]


def test_a_step_whose_checkpoint_is_gone_is_not_the_best():
    scores = {step: {"bleu": {"gl-en": score}} for step, score in ((1, 9.0), (2, 5.0), (3, 1.0))}
    levels = {"high": [], "medium": [], "low": ["gl-en"]}
    for kept, best in (([1, 2, 3], [1]), ([2, 3], [2]), ([], [])):
        rows = rows_by_step(scores, "dev", "bleu", levels, kept)
        assert [row["step"] for row in rows if row["best"]] == best
    assert said(rows, 3).endswith("(its checkpoint is gone)")


def test_without_a_baseline_there_are_scores_and_curves_and_no_differences(made, tmp_path):
    folder = made[0].html.parent.parent
    levels = {"high": ["pt-en"], "medium": [], "low": ["gl-en"]}
    rows = rows_by_step({7: {"bleu": {"gl-en": 1.0, "pt-en": 1.0}}}, "dev", "bleu", levels, [7])
    replace_rows(tmp_path / "scores_by_step.jsonl", "dev", rows)
    systems = [System("moe", folder / "moe")]
    about = Background(title="Scores")
    written = write_results(
        tmp_path, systems, DEFAULTS.metrics, TRAIN, background=about, baseline=None
    )
    assert (written.drawn, written.deltas, written.rows) == (None, None, [])
    assert {path.name for path in tmp_path.iterdir()} == {
        "rates.jsonl", "report.html", "scores.jsonl", "scores_by_step.jsonl",
    }  # fmt: skip


def test_scores_by_step_are_shown_with_the_best_one(made, tmp_path, monkeypatch):
    folder = made[0].html.parent.parent
    scores = {step: {"bleu": {"gl-en": score, "pt-en": 1.0}, "chrf": {"gl-en": 2.0, "pt-en": 3.0}}
              for step, score in ((1000, 5.0), (2000, 7.0), (3000, 7.0))}  # fmt: skip
    levels = {"high": ["pt-en"], "medium": [], "low": ["gl-en"]}
    path = tmp_path / "scores_by_step.jsonl"
    for split in ("dev", ATTACK):
        replace_rows(path, split, rows_by_step(scores, split, "bleu", levels, [*scores]))
    rows = read_rows(path)
    assert [(row["split"], row["step"]) for row in rows if row["best"]] == [
        ("dev", 2000), (ATTACK, 2000)]  # fmt: skip
    at = {(row["metric"], row["level"]): row["score"] for row in rows if row["step"] == 2000}
    assert at == {("bleu", "high"): 1.0, ("bleu", "low"): 7.0, ("bleu", "all"): 4.0,
                  ("chrf", "high"): 3.0, ("chrf", "low"): 2.0, ("chrf", "all"): 2.5}  # fmt: skip
    systems = [System(name, folder / name) for name in ("moe", "bilingual")]
    best = "The best checkpoint is that of step <b>2,000</b>, with a mean BLEU\nof 4.0"
    for kept in ([2000, 3000], [3000]):
        monkeypatch.setattr(page, "complete_steps", lambda _, kept=kept: kept)
        written = write_results(tmp_path, systems, DEFAULTS.metrics, TRAIN)
        text = written.html.read_text(encoding="utf-8")
        assert (best in text) == (2000 in kept)
        assert ("The best checkpoint is" in text) == (2000 in kept)
