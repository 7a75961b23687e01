"""The page at many languages: one table, one plot, one filter; in a browser where there is one."""

import json
import re
import shutil
import subprocess

import pytest

from m4.data.languages import LANGUAGES
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.report.page import SCRIPT, Background
from m4.eval.report.results import write_results
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import System
from m4.storage.files import write_jsonl

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
CODES = list(LANGUAGES)[:48]
PAIRS = {code: 9000 // (rank + 1) for rank, code in enumerate(CODES)}
SYSTEMS = {"moe_64": 8, "moe_8": 7, "dense": 6, "bilingual": 5}
TEXTS = [f"{n} Swiss francs per hour on May {n}" for n in range(1, 6)]


def decode(folder, directions, keep, texts=TEXTS):
    """Translations that have the first words of their references."""
    rows = [{"source": "x", "reference": t, "hypothesis": " ".join(t.split()[:keep])}
            for t in texts]  # fmt: skip
    for direction in directions:
        write_jsonl(folder / f"test.{direction}.jsonl", rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for system, keep in SYSTEMS.items():
        for rank, code in enumerate(CODES):
            # Of the last one, copies are better; of the one before it there are too few.
            cut = 1 if rank == 47 else keep - (rank % 3 == 0 and system == "dense")
            texts = TEXTS[:3] if rank == 46 else TEXTS
            rows = [{"source": t if rank == 47 else "x", "reference": t,
                     "hypothesis": " ".join(t.split()[:cut])} for t in texts]  # fmt: skip
            write_jsonl(folder / system / f"test.{code}-en.jsonl", rows)
    systems = [System(name, folder / name) for name in SYSTEMS]
    levels = ResourceLevels(min_test_sentences=5)
    written = write_results(
        folder / "out", systems, DEFAULTS.metrics, PAIRS, levels=levels, samples=1
    )
    return written, written.html.read_text(encoding="utf-8")


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
    """Returns the JSON that a script in the browser says of a page."""
    page = folder / "page.html"  # without its policy, which lets no other script run
    text = re.sub(r"<meta http-equiv=.*?>", "", text, flags=re.DOTALL)
    page.write_text(text.replace("<head>", f"<head>{ERRORS}", 1) + script, encoding="utf-8")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom")
    command = [
        BROWSER,
        *options,
        *more,
        f"--window-size={width},900",
        f"--user-data-dir={folder}/profile",
        page.as_uri(),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(said.partition("<pre>")[2].partition("</pre>")[0])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_in_a_browser_it_sorts_and_filters(made, tmp_path):
    plain, falling, rising, names, *ends, words, family, level = in_browser(
        tmp_path, made[1], CHECK
    )
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
    """Four hundred directions: two hundred languages, in all scripts, both ways."""
    folder = tmp_path_factory.mktemp("large")
    codes = [*LANGUAGES, *(f"{code}_2" for code in LANGUAGES)][:200]
    directions = [each for code in codes for each in (f"{code}-en", f"en-{code}")]
    for system, keep in {"moe": 8, "bilingual": 5}.items():
        decode(folder / system, directions, keep, TEXTS[:2])
    systems = [System(name, folder / name) for name in ("moe", "bilingual")]
    levels = ResourceLevels(min_test_sentences=1)
    pairs = {code: 90_000 // (rank + 1) for rank, code in enumerate(codes)}
    written = write_results(
        folder / "out", systems, DEFAULTS.metrics, pairs, levels=levels, samples=1
    )
    return codes, written.html.read_text(encoding="utf-8")


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
    assert [first.count(f">{name}<") for name in ("en English", "fr français", "wo Wolof")] == [
        2
    ] * 3
    assert "Directions with a frame have training pairs" in text
    assert '<a href="#matrix">' in text
