"""`m4 data audit`: the same counts as a build, and a page that shows any text as it is."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from m4.data.cleaning import clean
from m4.data.cleaning.ledger import Ledger
from m4.data.corpus import CorpusSpec
from m4.data.inspection import audit
from m4.data.inspection.audit_page import seen
from tests.command_line import TINY, m4
from tests.data.cleaning.cases import Listed

LONG = ("12345678901234567890123456789", "x")  # digits are separate pieces
LONG_TOO = ("98765432109876543210987654321", "w")
SETTINGS: dict[str, Any] = {"vocabulary_size": 320, "lengths": {"inputs": 24, "targets": 24}}


def source() -> Listed:
    pairs = [(f"word {n}", f"drow {n}") for n in range(60)]
    evil = ("<script>alert(1)</script>", "مرحبا\u202e")
    return Listed(
        {
            ("gl", "train"): [*pairs, LONG, pairs[3], ("tested", "y"), LONG, ("a", " ")],
            ("gl", "test"): [("Tested", "z"), LONG_TOO],
            ("ar", "train"): [*pairs, evil, evil, ("\u200b", "&")],
        }
    )


def corpus(folder: Path) -> tuple[CorpusSpec, Path]:
    return CorpusSpec(source(), **SETTINGS), folder


def test_audit_counts_as_the_build_does(tmp_path: Path) -> None:
    before = audit.audit(*corpus(tmp_path / "c"))
    assert not (tmp_path / "c").exists(), "nothing is made"
    made = CorpusSpec(source(), **SETTINGS).build(tmp_path / "c")
    built = made.ledger()
    # Without tokens, what is too long in pieces is not known, and said to be so.
    for code, splits in before.counts.items():
        for split, count in splits.items():
            why = "pieces: not tokenized yet"
            assert count.not_checked[why] == count.kept
            assert count.kept >= built.count(code, split).kept
    manifest = tmp_path / "c" / "manifest.json"
    ours = manifest.read_text(encoding="utf-8")
    manifest.write_text(json.dumps({**json.loads(ours), "format": 0}), encoding="utf-8")
    older = audit.audit(*corpus(tmp_path / "c")).count("gl", "train")
    assert older.not_checked == {"pieces: tokenized by another version of m4": older.kept}
    manifest.write_text(ours, encoding="utf-8")
    reported = []
    after = audit.audit(*corpus(tmp_path / "c"), on_drop=lambda *of: reported.append(of))
    assert after.as_json(examples=False) == built.as_json(examples=False)
    assert after.count("gl", "train").dropped[audit.PIECES] == 1, "the other one is a duplicate"
    assert after.count("gl", "test").flagged == {audit.PIECES: 1}
    assert [(of[0], of[3], of[4]) for of in reported if of[0] == audit.PIECES] == [
        (audit.PIECES, 61, LONG)
    ]
    other = audit.audit(*corpus(tmp_path / "c"), clean.thorough())
    assert other.count("gl", "train").not_checked["pieces: tokenized with other settings"]


def test_what_is_dropped_can_be_listed(tmp_path: Path) -> None:
    path, files = tmp_path / "dropped.jsonl.gz", []
    for reason in ("", "", "overlap"):
        with audit.listing(path, reason) as on_drop:
            ledger = audit.audit(*corpus(tmp_path / "c"), on_drop=on_drop)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    rows = [json.loads(line) for line in gzip.decompress(files[0]).splitlines()]
    assert len(rows) == sum(ledger.total().dropped.values()) == 6
    assert {"reason": "duplicates: exact pair", "language": "gl", "split": "train", "pair": 62,
            "english": "word 3", "translation": "drow 3"} in rows  # fmt: skip
    (row,) = [json.loads(line) for line in gzip.decompress(files[2]).splitlines()]
    assert (row["reason"], row["english"]) == ("overlap: english side in test", "tested")


class Page(HTMLParser):
    """The tags with their attributes, and the text, of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_shows_any_text_and_runs_none(tmp_path: Path) -> None:
    ledger = audit.audit(*corpus(tmp_path / "c"), clean.thorough())
    json_path, html_path = audit.write_report(tmp_path, ledger)
    page = Page(html_path.read_text(encoding="utf-8"))
    kinds = {tag for tag, _ in page.tags}
    assert not kinds & {"script", "img", "link", "iframe", "a", "object"}
    assert "<script>alert(1)</script>" in page.text, "shown, not run"
    policy = [a["content"] for _, a in page.tags if a.get("http-equiv")]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    sides = [a for tag, a in page.tags if tag == "td" and a.get("class") == "text"]
    assert {a["dir"] for a in sides} == {"auto"}
    assert {a["lang"] for a in sides} == {"en", "gl", "ar"}
    assert "مرحبا" in page.text
    assert "U+202E" in page.text, "what shows nothing, or turns the line around, is named"
    assert "\u202e" not in html_path.read_text(encoding="utf-8")
    for reason in ledger.reasons("dropped"):
        assert reason in page.text
    report = json.loads(json_path.read_text(encoding="utf-8"))
    assert Ledger.from_json(report).as_json() == ledger.as_json()
    assert report["total"]["train"]["read"] == 128
    assert report["stages_not_run"] == []


def test_what_cannot_be_seen_is_named() -> None:
    assert seen("a\u200bb\ud800") == [
        (False, "a"),
        (True, "U+200B"),
        (False, "b"),
        (True, "U+D800"),
    ]
    assert seen("plain שלום") == [(False, "plain שלום")]


def test_warnings_name_what_deserves_a_look() -> None:
    ledger = Ledger({"language_id": {}})
    most, all_, few = (ledger.count(code, "train") for code in ("gl", "pt", "es"))
    for count, dropped in ((most, 21), (all_, 100), (few, 20)):
        count.read = count.kept = 100
        count.drop("script: translation side", dropped)
    ledger.count("gl", "dev").flagged["overlap: english side in test"] = 3
    few.not_checked["language_id: py3langid is not installed"] = 80
    assert audit.warnings(ledger) == [
        "Galician (gl): 21% of the training pairs are dropped, 21 of them: "
        "script: translation side",
        "Portuguese (pt): no training pair is left",
        "3 dev pairs have an English side that is in a test set",
        "language_id: py3langid is not installed: the stage did not run",
    ]


def test_a_variant_of_english_is_named() -> None:
    ledger = Ledger()
    for code in ("gl", "en_GB"):
        ledger.count(code, "train").read = 1
        ledger.count(code, "train").kept = 1
    assert audit.warnings(ledger) == [
        "English (United Kingdom) (en_GB): English on both sides of its pairs; where you do not "
        "mean to translate into it, name the other languages (CorpusSpec.languages)"
    ]


def test_the_command(tmp_path: Path) -> None:
    model = tmp_path / "model"
    arguments = ("data", "audit", f"--gin_file={TINY}", f"--model_dir={model}")
    said = m4(*arguments, "--stages=all", "--list")
    assert said.status == 0, said.err
    for words in ("Galician", "Training pairs by language", "data_report.html"):
        assert words in said.out
    made = {path.name for path in model.iterdir() if not path.name.startswith(".")}
    assert made == {"data_report.json", "data_report.html", "dropped.jsonl.gz", "run.json",
                    "config.gin", "operative_config.gin"}  # fmt: skip
    assert m4(*arguments, "--list=nothing").mistake.startswith(
        "m4 data audit: --list=nothing: nothing is dropped for that; stages and reasons: "
    )
    clean = m4(*arguments, "--list=empty")  # a stage that has nothing to drop is no mistake
    assert clean.status == 0
    assert "--list=empty: nothing is dropped for that" in clean.out


def test_gin_sets_stages_and_their_options(tmp_path: Path) -> None:
    path = tmp_path / "strict.gin"
    path.write_text(
        TINY.read_text(encoding="utf-8").replace(
            "from m4.data import corpus\n",
            "from m4.data import corpus\nfrom m4.data.cleaning import clean\n"
            "from m4.data.cleaning import length\nfrom m4.data.cleaning import overlap\n",
        )
        + "corpus.CorpusSpec.cleaning = @clean.Cleaning()\n"
        "clean.Cleaning.stages = [@length.Length(), @overlap.Overlap()]\n"
        "length.Length.most_characters = 20\n"
        "overlap.Overlap.sides = ['english']\n",
        encoding="utf-8",
    )
    said = m4("data", "audit", f"--gin_file={path}", f"--model_dir={tmp_path / 'model'}")
    assert said.status == 0, said.err
    report = json.loads((tmp_path / "model" / "data_report.json").read_text(encoding="utf-8"))
    assert report["stages"]["length"] == {"most_characters": 20}
    assert report["stages"]["overlap"]["sides"] == ["english"]
    assert report["languages"]["es"]["train"]["dropped"]["length: english side"] > 20
    operative = (tmp_path / "model" / "operative_config.gin").read_text(encoding="utf-8")
    assert "length.Length.most_characters = 20" in operative


@pytest.mark.slow
def test_no_accelerator_is_touched(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from m4.__main__ import main\n"
        f"status = main(['data', 'audit', '--gin_file={TINY}', '--model_dir={tmp_path}'])\n"
        "from jax._src import xla_bridge\n"
        "bad = {'seqio', 'tensorflow', 'py3langid'} & set(sys.modules)\n"
        "assert not (status or bad or xla_bridge._backends), (status, bad, xla_bridge._backends)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
