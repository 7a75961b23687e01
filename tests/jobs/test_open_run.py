"""The door of a run's folder."""

import shutil
from pathlib import Path

import pytest

from m4.jobs.open_run import open_run
from m4.storage.locks import Busy
from tests.command_line import TINY, config_and_experiment, m4
from tests.shared import tiny_run

CONFIG = ("run.json", "config.gin", "operative_config.gin")


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_run(tmp_path_factory), tmp_path / "run"))


def test_a_refused_value_is_not_kept(run: Path) -> None:
    before = {name: (run / name).read_bytes() for name in CONFIG}
    said = m4("train", f"--model_dir={run}", "--gin.experiment.Data.data_dir='s3://x/y'")
    assert said.status == 2, said.err
    assert {name: (run / name).read_bytes() for name in CONFIG} == before
    said = m4("train", f"--model_dir={run}", "--gin.TRAIN_STEPS=5")
    assert said.status == 0, said.err
    assert "TRAIN_STEPS = 5" in (run / "config.gin").read_text()


def test_a_lock_that_is_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
    """A stranger's folder may have one to a file of whoever reads it."""
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    for kind in ("eval", "train"):
        (run / f".lock.{kind}").unlink(missing_ok=True)
        (run / f".lock.{kind}").symlink_to(victim)
    for job in ("report", "eval", "train"):
        said = m4(job, f"--model_dir={run}")
        assert said.status == 2, said.err
        assert said.err.count("\n") == 1, said.err
        assert victim.read_text() == "precious"


def test_one_job_of_a_kind_at_a_time(tmp_path: Path) -> None:
    config, experiment = config_and_experiment(TINY, f"MODEL_DIR = '{tmp_path}/run'")
    with open_run(experiment, config, "train") as run:
        before = {name: (run.folder / name).read_bytes() for name in CONFIG}
        for fresh in (False, True):
            with pytest.raises(Busy, match="another m4 job is at work there"):
                open_run(experiment, config, "train", fresh=fresh).__enter__()
        with open_run(experiment, config, "eval") as other, open_run(experiment, config) as reader:
            assert other.folder == reader.folder == run.folder
        with pytest.raises(Busy):
            open_run(experiment, config, "eval", fresh=True).__enter__()
        assert {name: (run.folder / name).read_bytes() for name in CONFIG} == before
    with open_run(experiment, config, "train", fresh=True):
        pass
