"""`m4 train` of the multilingual model ends where dev no longer improves."""

import pytest

from m4.storage.manifest import items_of
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import complete_steps, used_item
from tests.command_line import TINY, m4

STOP = "--gin.experiment.Training.early_stopping=@early_stopping.EarlyStopping()"
RULE = "--gin.early_stopping.EarlyStopping"


def train(folder, *arguments):
    return m4("train", f"--gin_file={TINY}", f"--model_dir={folder}", STOP, *arguments)


def stopping(metric, patience=1):
    """A rule by which the first evaluation alone is an improvement, from nothing."""
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
    run = tmp_path / "run"
    found = m4(
        command, f"--gin_file={TINY}", f"--model_dir={run}", STOP, f"{RULE}.metric='{metric}'"
    )
    assert said in found.mistake
    assert not (run / "data").exists()
