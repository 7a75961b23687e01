"""The door of a run's folder."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from m4.jobs.open_run import open_run
from m4.storage import files
from m4.storage.locks import Busy
from m4.storage.steps import latest_step
from tests.command_line import ALONE, TINY, config_and_experiment, contents, m4
from tests.shared import tiny_run

CONFIG = ("run.json", "config.gin", "operative_config.gin")


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_run(tmp_path_factory), tmp_path / "run"))


def test_a_refused_value_is_not_kept(run: Path) -> None:
    before = {name: (run / name).read_bytes() for name in CONFIG}
    refused = "--gin.experiment.Data.data_dir='s3://x/y'"
    assert "s3://x/y" in m4("train", f"--model_dir={run}", refused).mistake
    assert {name: (run / name).read_bytes() for name in CONFIG} == before
    m4("train", f"--model_dir={run}", "--gin.TRAIN_STEPS=5").ok()
    assert "TRAIN_STEPS = 5" in (run / "config.gin").read_text()


def test_a_lock_that_is_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
    """A stranger's folder may have one to a file of whoever reads it."""
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    for kind in ("eval", "train"):
        (run / f".lock.{kind}").unlink(missing_ok=True)
        (run / f".lock.{kind}").symlink_to(victim)
    for job in ("report", "eval", "train"):
        assert ".lock." in m4(job, f"--model_dir={run}").mistake
        assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    "name", ["checkpoints", "decodes", "vocabulary", "tensorboard", "decodes/2", ".hidden.tsv"]
)
def test_links_out_of_a_run_are_followed_where_its_user_says_so(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's folder may have one to where m4 would write or remove; inside, they may lead."""
    monkeypatch.setattr(files, "_followed", set())
    outside = tmp_path / "outside"
    if (run / name).exists():
        (run / name).rename(outside)
    else:
        outside.mkdir()
        (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(outside)
    before = contents(tmp_path)
    for job in ("train", "eval", "report", "watch", "atlas", "translate"):
        said = m4(job, f"--model_dir={run}", *(["--to=gl", "x"] if job == "translate" else []))
        assert f"{run / name}: a link to {outside}, outside of the run's" in said.mistake, job
    assert contents(tmp_path) == before
    m4("watch", "--once", "--follow_links", f"--model_dir={run}").ok()


def test_links_within_a_run_are_followed(run: Path) -> None:
    (run / "checkpoints").rename(run / "kept")
    (run / "checkpoints").symlink_to("kept")
    m4("train", f"--model_dir={run}", "--gin.TRAIN_STEPS=5").ok()
    assert (run / "kept" / "5").is_dir()


def test_a_folders_name_is_only_a_name(run: Path, tmp_path: Path) -> None:
    """In commands to paste and on the console; a line break could be a line in any file."""
    odd = run.rename(tmp_path / "[red] it's; $(touch x) [_b]")
    said = m4("train", f"--model_dir={odd}").ok()
    pasted = shlex.split(said.out.splitlines()[-1].partition("; next: ")[2])
    assert pasted == ["m4", "eval", f"--model_dir={odd}"]
    said = m4("checkpoint", "inspect", odd).ok()
    assert "[red] it's; $(touch x) [_b]" in " ".join(said.out.split())
    for name in ("a\nb", "a\x1b[2Jb", "a\u2028b"):
        for job in ("train", "report", "watch"):
            said = m4(job, f"--model_dir={odd.rename(tmp_path / name)}")
            assert f"{str(tmp_path / name)!r}: a name has no line breaks" in said.mistake
            (tmp_path / name).rename(odd)


def test_a_step_that_is_a_link_is_refused_before_training_would_remove_it(run: Path) -> None:
    (run / "checkpoints" / "2").rename(run / "two")
    (run / "checkpoints" / "2").symlink_to("../two")
    said = m4("train", f"--model_dir={run}", "--gin.TRAIN_STEPS=5")
    assert "checkpoints/2: a link to ../two; training removes old steps" in said.mistake


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "heartbeat.json", "scores.jsonl"])
def test_a_pipe_in_a_run_is_no_file(name: str, run: Path) -> None:
    """Reading it would never end."""
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for job in ("train", "eval", "report", "watch"):
        said = m4(job, f"--model_dir={run}")
        assert f"{run / name}: not a file but a pipe" in said.mistake, job


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


# -------- readers: they work next to a training process


@pytest.mark.slow
@pytest.mark.thorough
def test_readers_work_next_to_a_training_process(tmp_path: Path) -> None:
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("3 weeks ago\nlast Monday\n", encoding="utf-8")
    keep = ("checkpoint_period=20", "keep_checkpoints=100000", "log_period=20", "dev_period=100000")
    training = [sys.executable, "-m", "m4", "train", f"--gin_file={TINY}", f"--model_dir={run}",
                "--gin.TRAIN_STEPS=1000000",
                *(f"--gin.experiment.Training.{name}" for name in keep)]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(training, env=ALONE, stdout=log, stderr=subprocess.STDOUT)

    def trained_to(step: int) -> None:
        while (latest_step(run / "checkpoints") or 0) < step:
            assert job.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
            time.sleep(0.05)

    try:
        trained_to(40)
        kept = {name: (run / name).read_bytes() for name in ("run.json", "config.gin")}
        for name, *more in (
            ("score", "--split=dev"),
            ("decode", f"--input={text}", "--to=gl", f"--output={tmp_path / 'gl.txt'}"),
            ("average", "--steps=20,40", f"--output={tmp_path / 'mean'}"), ("eval", "--step=40"),
            ("translate", "--to=gl", "3 weeks ago"), ("watch", "--once"), ("atlas",),
            ("data", "preview"),
        ):  # fmt: skip
            said = m4(name, *more, f"--model_dir={run}")
            assert said.status == 0, (name, said.err)
            trained_to((latest_step(run / "checkpoints") or 0) + 1)  # it trains on
        assert {name: (run / name).read_bytes() for name in kept} == kept
        assert len((tmp_path / "gl.txt").read_text(encoding="utf-8").splitlines()) == 2
        assert (run / "decodes" / "logprob-dev.en-gl.jsonl").is_file()
        assert latest_step(tmp_path / "mean" / "checkpoints") == 40
    finally:
        job.terminate()
        status = job.wait()
    assert status == 130, (tmp_path / "log").read_text(encoding="utf-8")
