"""`m4 score_files`: the scores of sacreBLEU and m4's rates, of files alone."""

import json
import sys
from pathlib import Path

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.ter import TER

from tests.command_line import TINY, m4

SOURCE = ["3 weeks ago", "in 2 days", "the third of May", "17 yards per hour"]
HYPOTHESIS = ["hai 3 semanas", "in 2 days", "o tres de maio", ""]
REFERENCES = [
    ["hai 3 semanas", "en 2 d\u00edas", "o 3 de maio", "17 iardas por hora"],
    ["3 semanas atr\u00e1s", "dentro de 2 d\u00edas", "o tres de maio", "17 iardas \u00e1 hora"],
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("HOME", str(tmp_path))  # where a scorer's scores are kept
    texts = {
        "test.en": SOURCE, "system.gl": HYPOTHESIS, "a.gl": REFERENCES[0], "b.gl": REFERENCES[1],
    }  # fmt: skip
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [str(tmp_path / name) for name in texts]


def test_scores_and_rates_of_files(files: list[str]) -> None:
    scorer = f"{sys.executable} {TINY.with_name('stand_in_scorer.py')}"
    said = m4("score-files", *files, "--to=gl", "--metrics=bleu,ter", "--json",
              f"--scorer=letters={scorer}").ok()  # fmt: skip
    rows = [json.loads(line) for line in said.out.splitlines() if line.startswith("{")]
    scores = {(row["system"], row["metric"]): row for row in rows if "metric" in row}
    for name, its in (("bleu", BLEU()), ("ter", TER())):
        expected = its.corpus_score(HYPOTHESIS, REFERENCES)
        row = scores["system.gl", name]
        assert row["score"] == pytest.approx(expected.score, abs=1e-6)
        assert row["signature"].startswith("nrefs:2|bs:1000|")
        assert row["low"] <= row["score"] <= row["high"]
    assert scores["system.gl", "letters"]["score"] > scores["copy", "letters"]["score"]
    (rates,) = (row for row in rows if row.get("system") == "system.gl" and "empty" in row)
    assert (rates["copies"], rates["empty"], rates["loops"]) == (0.25, 0.25, 0)


def test_the_same_as_a_table(files: list[str]) -> None:
    said = m4("score_files", *files[:3], "--from=fr", "--to=gl").ok()  # any pair of languages
    assert "fr-gl" in said.out
    assert "bleu: nrefs:1|" in said.out
    assert "length ratio" in said.out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--metrics=bleu,comet"], "--metrics=comet: must be of bleu, chrf, chrfpp"),
        (["--scorer=comet"], "--scorer=comet: must be NAME=COMMAND"),
    ],
)
def test_mistakes_are_one_line(files: list[str], more: list[str], message: str) -> None:
    assert message in m4("score_files", *files, "--to=gl", *more).mistake


def test_files_that_do_not_line_up_name_both_counts(files: list[str]) -> None:
    with open(files[1], "a", encoding="utf-8") as file:
        file.write("one more\n")
    mistake = m4("score_files", *files, "--to=gl").mistake
    assert "has 4 lines" in mistake
    assert mistake.endswith(f"{files[1]} 5: must be as many")
