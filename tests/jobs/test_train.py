"""`m4 train`: where it ends, and what a run that continues another one keeps and forgets."""

import json
import shutil
from pathlib import Path

import pytest

from m4.storage.files import read_jsonl
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import complete_steps, items_of, used_item
from tests.command_line import TINY, Said, m4

STOP = "--gin.experiment.Training.early_stopping=@early_stopping.EarlyStopping()"
RULE = "--gin.early_stopping.EarlyStopping"


def train(folder, *arguments):
    return m4("train", f"--gin_file={TINY}", f"--model_dir={folder}", STOP, *arguments)


def stopping(metric, patience=1):
    """Returns flags of a rule by which only the first evaluation is an improvement."""
    periods = [f"--gin.experiment.Training.{name}=1" for name in ("dev_period", "dev_pairs")]
    return [f"{RULE}.metric='{metric}'", f"{RULE}.min_delta=1000.0",
            f"{RULE}.patience={patience}", "--gin.TRAIN_STEPS=9", *periods]  # fmt: skip


def test_training_ends_by_dev_nll_and_goes_on_with_more_patience(first, tmp_path):
    data = f"--gin.experiment.Data.data_dir='{first}/data'"
    said = train(tmp_path / "run", *stopping("dev/nll"), data).ok()
    rows = {
        row["step"]: row["dev/nll"] for row in read_metrics(tmp_path / "run") if "dev/nll" in row
    }
    assert [*rows] == [1, 2]
    best = min(rows, key=rows.__getitem__)
    line = f"stopped early: dev/nll was best, {rows[best]:.4g}, at step {best}, whose parameters"
    assert line in said.out
    again = train(tmp_path / "run", *stopping("dev/nll"), data)
    assert f"already at step 2, {line}" in again.out
    train(tmp_path / "run", *stopping("dev/nll", 3), data).ok()
    assert complete_steps(tmp_path / "run" / "checkpoints")[-1] == 4
    # Whoever translates takes the best parameters.
    assert used_item(items_of(tmp_path / "run" / "checkpoints" / "4")) == "best"


def test_dev_chrf_is_of_a_sample_of_the_dev_sentences(first, tmp_path):
    data = f"--gin.experiment.Data.data_dir='{first}/data'"
    train(tmp_path / "run", *stopping("dev/chrf/en-gl"), data).ok()
    rows = [row for row in read_metrics(tmp_path / "run") if "dev/chrf" in row]
    assert [row["step"] for row in rows] == [1, 2]
    languages = [name for name in rows[0] if name.startswith("dev/chrf/")]
    assert len(languages) == 6
    assert rows[0]["dev/chrf"] == pytest.approx(sum(rows[0][name] for name in languages) / 6)


@pytest.mark.parametrize(
    ("command", "metric", "said"),
    [
        ("train", "dev/bleu", "must be dev/nll or dev/chrf"),
        ("train", "dev/nll/en-fo", "of a direction that has dev sentences: en-es, en-pt"),
        ("baselines", "dev/nll", "bilingual/early_stopping.EarlyStopping.metric = 'dev/chrf'"),
    ],
)
def test_a_rule_without_measurements_is_refused(tmp_path, command, metric, said):
    run, rule = tmp_path / "run", f"{RULE}.metric='{metric}'"
    found = m4(command, f"--gin_file={TINY}", f"--model_dir={run}", STOP, rule)
    assert said in found.mistake
    assert not (run / "data").exists()


# -------- Data.keep: a run that continues another one, and what it forgets of it


SIZES = "--gin.cldr.Cldr.sizes={'es': 150, 'pt': 100, 'gl': 60, 'fy': 80}"
KEEP = "--gin.experiment.Data.keep=['es', 'pt', 'gl-en']"
WITHOUT = "--gin.experiment.Experiment.baselines=None"


def continued(folder: Path, old: Path, *more: str) -> Said:
    grown = [f"--gin.corpus.CorpusSpec.vocabulary_from='{old}'",
             "--gin.corpus.CorpusSpec.vocabulary_size=512"]  # fmt: skip
    words = [f"--gin_file={TINY}", f"--model_dir={folder}", f"--init_from={old}", SIZES, *grown]
    return m4("train", *words, *more)


@pytest.fixture(scope="module")
def old(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the run of four steps, with translations."""
    m4("decode", f"--model_dir={first}").ok()
    return first


@pytest.mark.thorough
def test_a_run_says_what_it_forgets_of_the_one_that_it_begins_from(
    old: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    continued(new, old, KEEP, WITHOUT, "--gin.experiment.Data.keep_share=0.3").ok()
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
    several = m4("report", old, new, f"--output={tmp_path}/page", "--levels=140,80,10").ok()
    assert "None: for gl the source itself is a better translation." in several.out
    assert read_jsonl(tmp_path / "page" / "forgotten.jsonl")
    best = read_jsonl(tmp_path / "page" / "winners.jsonl")
    assert {row["language"] for row in best} == {"gl", "all"}  # en-gl alone is not kept
    assert (tmp_path / "page" / "forgotten.svg").is_file()


@pytest.mark.thorough
def test_without_old_translations_the_command_that_makes_them_is_said(
    first: Path, tmp_path: Path
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    shutil.copytree(first, old, ignore=shutil.ignore_patterns("decodes"))
    continued(new, old, KEEP, WITHOUT, "--gin.TRAIN_STEPS=1").ok()
    m4("decode", f"--model_dir={new}").ok()
    said = m4("report", f"--model_dir={new}").ok()
    assert f"what moe forgets is not known: {old} has not translated the test sets" in said.err
    assert f"m4 decode --model_dir={old} --step=4" in said.err


def test_what_cannot_be_kept_is_one_line(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "must be None with Data.keep" in continued(run, first, KEEP).mistake
    unknown = continued(run, first, "--gin.experiment.Data.keep=['fr']", WITHOUT)
    assert "'fr': must be a language or direction of" in unknown.mistake
    alone = continued(run, first, WITHOUT, "--gin.experiment.Data.keep_share=0.3")
    assert "keep_share = 0.3" in alone.mistake
    assert not (run / "checkpoints").exists()
