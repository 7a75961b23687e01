"""The page at many languages: one table, one plot, one filter; in a browser where there is one."""

import json
import re
import shutil
import subprocess

import pytest

from m4.data.languages import LANGUAGES
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.report.page import SCRIPT
from m4.eval.report.results import write_results
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import System
from m4.storage.files import write_jsonl
from tests.eval.report.chromium import browser

CODES = list(LANGUAGES)[:48]
PAIRS = {code: 9000 // (rank + 1) for rank, code in enumerate(CODES)}
SYSTEMS = {"moe_64": 8, "moe_8": 7, "dense": 6, "bilingual": 5}
TEXTS = [f"{n} Swiss francs per hour on May {n}" for n in range(1, 6)]


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


def test_languages_have_family_level_and_their_own_name(made):
    _, text = made
    row = re.findall(r'<tr data-language="ar" data-level.*?</tr>', text, re.DOTALL)[0]
    assert 'data-family="Afro-Asiatic"' in row
    assert 'data-words="ar arabic العربية"' in row
    assert '<bdi class="soft own" lang="ar">العربية</bdi>' in row
    for name in ("日本語", "עברית", "ไทย"):
        assert f">{name}</bdi>" in text


def test_the_plot_has_an_area_a_language_in_each_panel(made):
    _, text = made
    assert re.findall(r'<svg class="chart (\w+)"', text) == ["wide", "narrow"]
    for chart in re.findall(r'<svg class="chart.*?</svg>', text, re.DOTALL):
        assert re.findall(r'data-language="(\w+)"', chart) == CODES * 2
        assert "NaN" not in chart
        assert not re.findall(r"\snan[\s\"]", chart)
        # The page's colours, not the figure's.
        assert "var(--series-2" in chart
        assert "#222222" not in chart
    about = re.findall(r'data-language="fr"[^>]* data-about="(.*?)"', text, re.DOTALL)[0]
    assert about.splitlines()[0] == "French · français (fr)"
    assert about.splitlines()[1] == "Romance, high: 4,500 pairs"
    assert about.count("\n") == 5


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_the_script_is_javascript():
    subprocess.run(["node", "--check", str(SCRIPT)], check=True)


def test_the_script_asks_for_nothing_and_writes_no_markup():
    code = SCRIPT.read_text(encoding="utf-8")
    for word in (
        *("</script", "innerHTML", "insertAdjacentHTML", "document.write", "fetch(", "import("),
        *("XMLHttpRequest", "eval(", "localStorage", "http:", "https:"),
    ):
        assert word not in code, word


def test_in_a_browser_it_sorts_filters_and_fits(made, tmp_path):
    written, _ = made
    rows = "[...document.querySelectorAll('#languages tbody:first-of-type tr')]"
    shown = f"{rows}.filter(row => !row.hidden).map(row => row.dataset.language)"
    head = "document.querySelector('#languages th[data-column=\"{}\"]')"
    with browser(tmp_path / "profile") as page:
        for width in (1300, 400):
            page.open(written.html, width)
            assert page.run("document.documentElement.scrollWidth") <= width
            # Only one of the two plots, and its letters are legible.
            charts = page.run("[...document.querySelectorAll('svg.chart')].map(one => "
                              "one.getBoundingClientRect()).map(at => at.width)")  # fmt: skip
            assert [at > 0 for at in charts] == [width > 600, width < 600]
            letters = page.run(
                "[...document.querySelectorAll('svg.chart')].map(one => 11 * "
                "one.getBoundingClientRect().width / one.viewBox.baseVal.width)"
            )
            assert max(letters) > 9
        page.open(written.html)
        assert page.run(shown) == CODES
        page.run(head.format(3) + ".querySelector('button').click()")
        assert page.run(shown) == CODES
        page.run(head.format(3) + ".querySelector('button').click()")
        assert page.run(shown) == CODES[::-1]
        assert page.run(head.format(3) + ".getAttribute('aria-sort')") == "ascending"
        page.run(head.format(0) + ".querySelector('button').click()")
        assert page.run(shown) == sorted(CODES)
        # An undertrained difference is not a number: last either way.
        for _ in range(2):
            page.run(head.format(7) + ".querySelector('button').click()")
            assert page.run(shown)[-1] == CODES[47]

        form = "document.querySelector('form.filter')"
        for field, value, wanted in (
            ("words", "العرب", ["ar"]),
            ("family", "Turkic", [c for c in CODES if LANGUAGES[c].branch == "turkic"]),
            ("level", "high", CODES[:3]),
        ):
            page.run(f"{form}.elements.{field}.value = {json.dumps(value)}; "
                     f"{form}.dispatchEvent(new Event('input'))")  # fmt: skip
            assert sorted(page.run(shown)) == sorted(wanted)
            out = page.run("document.querySelectorAll('svg.chart.wide .out').length")
            assert out == 2 * (48 - len(wanted))
            said = page.run(f"{form}.querySelector('output').textContent")
            assert said == f"{len(wanted)} of 48 languages"
            page.run(f"{form}.reset()")
            page.run("new Promise(done => setTimeout(done, 0))")
        assert len(page.run(shown)) == 48

        page.run(
            "(() => { const hit = document.querySelector('svg.wide [data-language=fr] path');"
            "const at = hit.getBoundingClientRect();"
            "hit.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: at.x + 3,"
            "clientY: 300})); })()"
        )
        assert page.run("document.querySelector('#here').textContent").startswith("French")
        assert page.run("document.querySelector('#here').hidden") is False
        page.run("document.body.dispatchEvent(new PointerEvent('pointerdown', {bubbles: true}))")
        assert page.run("document.querySelector('#here').hidden") is True
        assert page.said == []
