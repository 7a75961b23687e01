"""The files of a report; its page, also of many languages, in a browser where there is one."""

import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess

import pytest

from m4.data.languages import LANGUAGES
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.report import results
from m4.eval.report.plot import draw
from m4.eval.report.results import SCRIPT, Background, write_results
from m4.eval.scoring.delta import from_plain
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import System, read_by_step, replace_by_step, rows_by_step, said_by_step
from m4.storage.files import read_jsonl
from tests.eval.scoring.test_score import write

ATTACK = '<script>alert("x")</script><img src=https://example.org/a.png onerror=x>'
TRAIN = {"pt": 4000, "gl": 250, "he": 150}


class Outline(html.parser.HTMLParser):
    """Parser that keeps open elements, seen tags and attributes, and fails on bad nesting."""

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
                write(folder / system, f"{source}-{target}", hypotheses, wanted, texts)
    config = folder / "operative.gin"
    config.write_text(f"# {ATTACK}\ntrain.steps = 1675\n", encoding="utf-8")
    background = Background(
        title=f"A run {ATTACK}", corpus=f"Controlled language.\n\n{ATTACK}",
        facts={"date": "2026-01-02", ATTACK: ATTACK}, configs={ATTACK: config},
        curves={ATTACK: [{"step": step, "nll": 9.0 / (step + 1)} for step in range(9)]},
        sampling={"gl": 0.25}, epochs={"gl": 41.0},
    )  # fmt: skip
    written = write_results(
        folder / "out",
        [System(name, folder / name, f"{name}.gin", 7) for name in ("moe", "bilingual")],
        DEFAULTS.metrics, TRAIN,
        {f"en-{language}": {"seen": [n % 2 == 0 for n in range(20)]} for language in TRAIN},
        background, levels=ResourceLevels(min_test_sentences=20), samples=20,
    )  # fmt: skip
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
    assert said_by_step(rows, 3).endswith("(its checkpoint is gone)")


def test_without_a_baseline_there_are_scores_and_curves_and_no_differences(made, tmp_path):
    folder = made[0].html.parent.parent
    levels = {"high": ["pt-en"], "medium": [], "low": ["gl-en"]}
    rows = rows_by_step({7: {"bleu": {"gl-en": 1.0, "pt-en": 1.0}}}, "dev", "bleu", levels, [7])
    replace_by_step(tmp_path / "scores_by_step.jsonl", "dev", rows)
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
        replace_by_step(path, split, rows_by_step(scores, split, "bleu", levels, [*scores]))
    rows = read_by_step(path)
    assert [(row["split"], row["step"]) for row in rows if row["best"]] == [
        ("dev", 2000), (ATTACK, 2000)]  # fmt: skip
    at = {(row["metric"], row["level"]): row["score"] for row in rows if row["step"] == 2000}
    assert at == {("bleu", "high"): 1.0, ("bleu", "low"): 7.0, ("bleu", "all"): 4.0,
                  ("chrf", "high"): 3.0, ("chrf", "low"): 2.0, ("chrf", "all"): 2.5}  # fmt: skip
    systems = [System(name, folder / name) for name in ("moe", "bilingual")]
    for kept in ([2000, 3000], [3000]):
        monkeypatch.setattr(results, "complete_steps", lambda _, kept=kept: kept)
        written = write_results(tmp_path, systems, DEFAULTS.metrics, TRAIN)
        assert ("step <b>2,000</b>" in written.html.read_text(encoding="utf-8")) == (2000 in kept)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
CODES = list(LANGUAGES)[:48]
PAIRS = {code: 9000 // (rank + 1) for rank, code in enumerate(CODES)}
SYSTEMS = {"moe_64": 8, "moe_8": 7, "dense": 6, "bilingual": 5}
TEXTS = [f"{n} Swiss francs per hour on May {n}" for n in range(1, 6)]


def decode(folder, directions, keep, texts=TEXTS):
    """Returns translations that have the first words of their references."""
    for direction in directions:
        write(folder, direction, [first(t, keep) for t in texts], texts, ["x"] * len(texts))


def first(text, words):
    return " ".join(text.split()[:words])


def page_of(folder, systems, pairs, levels):
    out, metrics = folder / "out", DEFAULTS.metrics[:1]
    written = write_results(out, systems, metrics, pairs, levels=levels, samples=1)
    return written.html.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for system, keep in SYSTEMS.items():
        for rank, code in enumerate(CODES):
            # Copies of the last one score better; the one before it has too few sentences.
            cut = 1 if rank == 47 else keep - (rank % 3 == 0 and system == "dense")
            texts = TEXTS[:3] if rank == 46 else TEXTS
            sources = texts if rank == 47 else ["x"] * len(texts)
            write(folder / system, f"{code}-en", [first(t, cut) for t in texts], texts, sources)
    systems = [System(name, folder / name) for name in SYSTEMS]
    levels = ResourceLevels(min_test_sentences=5)
    return page_of(folder, systems, PAIRS, levels)


def test_the_script_asks_for_nothing_and_writes_no_markup():
    code = SCRIPT.read_text(encoding="utf-8")
    for word in (
        *("</script", "innerHTML", "insertAdjacentHTML", "document.write", "fetch(", "import("),
        *("XMLHttpRequest", "eval(", "localStorage", "http:", "https:"),
    ):
        assert word not in code, word


CHECK = """<script>
const rows = () => [...document.querySelectorAll('#languages tbody:first-of-type tr')];
const shown = () => rows().filter(row => !row.hidden).map(row => row.dataset.language);
const click = column => document.querySelector(
    `#languages th[data-column="${column}"] button`).click();
const found = [shown()];
for (const column of [1, 1, 0, 4, 4]) { click(column); found.push(shown()); }
const form = document.querySelector('form.filter');
for (const [field, value] of [['words', 'العرب'], ['family', 'Turkic'], ['level', 'high']]) {
    form.elements[field].value = value;
    form.dispatchEvent(new Event('input'));
    found.push(shown());
    form.elements[field].value = '';
}
document.documentElement.innerHTML = `<pre>${JSON.stringify(found)}</pre>`;
</script>"""


# Before the page's own script; what it logs as an error is one, too.
ERRORS = """<script>
const errors = [];
addEventListener('error', event => errors.push(event.message));
console.error = (...words) => errors.push(words.join(' '));
</script>"""


def in_browser(folder, text, script, width=1300, *more):
    """Returns the JSON that a script in the browser makes of a page."""
    page = folder / "page.html"  # without its policy, which lets no other script run
    text = re.sub(r"<meta http-equiv=.*?>", "", text, flags=re.DOTALL)
    page.write_text(text.replace("<head>", f"<head>{ERRORS}", 1) + script, encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    options += [f"--window-size={width},900", f"--user-data-dir={folder}/profile"]
    command = [BROWSER, *options, *more, page.as_uri()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(said.partition("<pre>")[2].partition("</pre>")[0])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_in_a_browser_it_sorts_and_filters(many, tmp_path):
    plain, falling, rising, names, *ends, words, family, level = in_browser(tmp_path, many, CHECK)
    assert plain == falling == CODES
    assert rising == CODES[::-1]
    assert names == sorted(CODES)
    # An undertrained difference is not a number: last either way.
    assert [end[-1] for end in ends] == [CODES[47]] * 2
    assert words == ["ar"]
    assert sorted(family) == sorted(c for c in CODES if LANGUAGES[c].branch == "turkic")
    assert sorted(level) == sorted(CODES[:3])


# A pointer over a language of the plot, and away from it; the page's width and colours.
HOVER = """<script>
document.documentElement.style.width = 'WIDTHpx';
const chart = [...document.querySelectorAll('svg.chart')].find(
    each => getComputedStyle(each).display !== 'none') ?? document.querySelector('svg.chart');
const box = document.querySelector('#here');
const move = (type, target) => target.dispatchEvent(
    new PointerEvent(type, { bubbles: true, clientX: 40, clientY: 40 }));
const seen = [];
for (const area of chart.querySelectorAll('g[data-language]')) {
    move('pointermove', area);
    seen.push([area.dataset.language, box.hidden, box.textContent]);
}
move('pointerleave', chart);
const light = name => {
    const [r, g, b] = getComputedStyle(document.body)[name].match(/[0-9.]+/g).map(Number);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const wide = [...document.querySelectorAll('body *')].filter(one =>
    !one.closest('.wide, pre, svg') && one.scrollWidth > WIDTH).map(one => one.tagName);
const tables = [...document.querySelectorAll('#averages .wide, #languages .wide')].map(
    table => [table.clientWidth, table.scrollWidth]);
const said = { errors, seen, left: box.hidden, wide, tables,
    ink: light('color'), paper: light('backgroundColor') };
document.documentElement.innerHTML = `<pre>${JSON.stringify(said).replaceAll('<', ' ')}</pre>`;
</script>"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Returns a report on 400 directions: 200 languages, in all scripts, both ways."""
    folder = tmp_path_factory.mktemp("large")
    codes = [*LANGUAGES, *(f"{code}_2" for code in LANGUAGES)][:200]
    directions = [each for code in codes for each in (f"{code}-en", f"en-{code}")]
    for system, keep in {"moe": 8, "bilingual": 5}.items():
        decode(folder / system, directions, keep, TEXTS[:2])
    systems = [System(name, folder / name) for name in ("moe", "bilingual")]
    levels = ResourceLevels(min_test_sentences=1)
    pairs = {code: 90_000 // (rank + 1) for rank, code in enumerate(codes)}
    return codes, page_of(folder, systems, pairs, levels)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (1300, True), (400, False)])
def test_four_hundred_directions_can_be_read_and_pointed_at(large, tmp_path, width, dark):
    codes, text = large
    more = ["--blink-settings=preferredColorScheme=0"] if dark else []
    said = in_browser(tmp_path, text, HOVER.replace("WIDTH", str(width)), max(width, 500), *more)
    assert said["errors"] == []
    assert {code for code, *_ in said["seen"]} == set(codes)
    for code, hidden, shown in said["seen"]:
        assert not hidden
        assert code in shown
    assert said["left"]
    assert said["wide"] == []
    for room, needed in said["tables"]:
        assert needed <= room < width
    assert (said["ink"] > said["paper"]) == dark
    assert abs(said["ink"] - said["paper"]) > 150


def test_pairs_without_english_are_heat_maps(tmp_path):
    """From French into Wolof and back, and English into French: 3 sources, 2 targets."""
    for system, keep in {"moe": 8, "other": 5}.items():
        decode(tmp_path / system, ("fr-wo", "wo-fr", "en-fr"), keep)
    systems = [System(name, tmp_path / name) for name in ("moe", "other")]
    pairs = {"fr-wo": 100, "fr": 200}
    framed = {"metric": "bleu", "subset": "all", "direction": "wo-en", "score": 12.3}
    trained = Background(trained=[framed])
    written = write_results(
        tmp_path / "out", systems, DEFAULTS.metrics, pairs, None, trained, "other", samples=1
    )
    text = written.html.read_text(encoding="utf-8")
    part = text.partition('<section id="matrix">')[2].partition("</section>")[0]
    maps = dict(re.findall(r'aria-label="(.*?)".*?</svg>()', part, re.DOTALL))
    assert [*maps][:3] == ["BLEU of moe", "BLEU of other", "ΔBLEU of moe against other"]
    first, _, rest = part.partition("</svg>")
    # All of it is right in three directions. English, French and Wolof are rows and columns.
    assert (first.count(">100.0<"), first.count(">12.3<"), rest.count(">12.3<")) == (3, 1, 0)
    for name in ("en English", "fr français", "wo Wolof"):
        assert first.count(f">{name}<") == 2
    assert "Directions with a frame have training pairs" in text
    assert '<a href="#matrix">' in text
