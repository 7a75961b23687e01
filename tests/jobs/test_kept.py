"""`Data.keep`: a run that continues another one, and what it forgets of it."""

import json
from pathlib import Path

import pytest

from m4.storage.files import read_jsonl
from tests.command_line import TINY, Said, m4

SIZES = "--gin.cldr.Cldr.sizes={'es': 150, 'pt': 100, 'gl': 60, 'fy': 80}"
KEEP = "--gin.experiment.Data.keep=['es', 'pt', 'gl-en']"
WITHOUT = "--gin.experiment.Experiment.baselines=None"


def train(folder: Path, old: Path, *more: str) -> Said:
    grown = [f"--gin.corpus.CorpusSpec.vocabulary_from='{old}'",
             "--gin.corpus.CorpusSpec.vocabulary_size=512"]  # fmt: skip
    words = [f"--gin_file={TINY}", f"--model_dir={folder}", f"--init_from={old}", SIZES, *grown]
    return m4("train", *words, *more)


@pytest.fixture(scope="module")
def old(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of four steps, with translations."""
    m4("decode", f"--model_dir={first}").ok()
    return first


def test_a_run_says_what_it_forgets_of_the_one_that_it_begins_from(
    old: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    train(new, old, KEEP, WITHOUT, "--gin.experiment.Data.keep_share=0.3").ok()
    kept = ["en-es", "en-pt", "es-en", "pt-en", "gl-en"]
    assert json.loads((new / "run.json").read_text())["initial"]["kept"] == kept
    rows = read_jsonl(new / "metrics.jsonl")
    shares = {name: row[name] for row in rows for name in row if name.startswith("share/")}
    assert {*shares} == {f"share/{d}" for d in (*kept, "en-gl", "en-fy", "fy-en")}
    dev = next(row for row in reversed(rows) if "dev/nll" in row)
    others = [dev[f"dev/nll/{name}"] for name in ("en-gl", "en-fy", "fy-en")]
    assert min(others) <= dev["dev/nll"] <= max(others)
    m4("eval", f"--model_dir={new}").ok()
    said = m4("report", f"--model_dir={new}").ok()
    assert "What is forgotten" in said.out
    changes = read_jsonl(new / "forgotten.jsonl")
    assert [row["direction"] for row in changes if row["direction"] not in kept] == []
    assert len(changes) == len(kept)
    assert all(row["delta"] == row["system_score"] - row["baseline_score"] for row in changes)
    assert "What is forgotten" in (new / "report.html").read_text(encoding="utf-8")
    # Next to others, too; only what both have translated is compared.
    several = m4(
        "report", str(old), str(new), f"--output={tmp_path}/page", "--levels=140,80,10"
    ).ok()
    assert "None: for gl the source itself is a better translation." in several.out
    assert read_jsonl(tmp_path / "page" / "forgotten.jsonl")
    best = read_jsonl(tmp_path / "page" / "winners.jsonl")
    assert {row["language"] for row in best} == {"gl", "all"}  # en-gl alone is not kept
    assert (tmp_path / "page" / "forgotten.svg").is_file()


def test_a_run_of_no_steps_forgets_nothing(old: Path, tmp_path: Path) -> None:
    """Whose vocabulary has not grown; so a pretrained model becomes a run."""
    new, same = tmp_path / "new", "--gin.cldr.Cldr.sizes={'es': 150, 'pt': 100, 'gl': 60}"
    words = [f"--gin_file={TINY}", f"--model_dir={new}", f"--init_from={old}", same, WITHOUT]
    keep = "--gin.experiment.Data.keep=['es', 'pt']"
    m4("train", *words, keep, "--gin.TRAIN_STEPS=0").ok()
    m4("decode", f"--model_dir={new}").ok()
    m4("report", f"--model_dir={new}").ok()
    changes = read_jsonl(new / "forgotten.jsonl")
    assert {(row["delta"], row["low"], row["high"]) for row in changes} == {(0, 0, 0)}
    assert len(changes) == 4


def test_without_old_translations_the_command_that_makes_them_is_said(
    first: Path, tmp_path: Path
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    m4("train", f"--gin_file={TINY}", f"--model_dir={old}", "--gin.TRAIN_STEPS=2").ok()
    train(new, old, KEEP, WITHOUT, "--gin.TRAIN_STEPS=1").ok()
    m4("decode", f"--model_dir={new}").ok()
    said = m4("report", f"--model_dir={new}").ok()
    assert f"what moe forgets is not known: {old} has not translated the test sets" in said.err
    assert f"m4 decode --model_dir={old} --step=2" in said.err


def test_what_cannot_be_kept_is_one_line(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "must be None with Data.keep" in train(run, first, KEEP).mistake
    unknown = train(run, first, "--gin.experiment.Data.keep=['fr']", WITHOUT)
    assert "experiment.Data.keep = ['fr']: must be" not in unknown.out
    assert "'fr': must be a language or direction of" in unknown.mistake
    alone = train(run, first, WITHOUT, "--gin.experiment.Data.keep_share=0.3")
    assert "keep_share = 0.3" in alone.mistake
    assert not (run / "checkpoints").exists()
