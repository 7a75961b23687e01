"""Settings that one command overrides: they live for it, and its results have their own folder."""

import os
import shlex
import shutil
from pathlib import Path

import pytest

from m4.storage.files import read_jsonl
from tests.command_line import TINY, Said, contents, m4
from tests.shared import demo_run

RUN = "runs/demo"
CONFIG = ("run.json", "config.gin", "operative_config.gin")


@pytest.fixture
def run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Returns the demo's run, runs/demo in the working folder."""
    made, _ = demo_run(tmp_path_factory)
    shutil.copytree(made / RUN, tmp_path / RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    return Path(RUN)


def state(run: Path) -> dict[str, str | bytes]:
    """Returns the files that a trial must keep: all but trials' own folders and heartbeats."""
    files = {name: said for name, said in contents(run).items()
             if "=" not in name and not name.endswith("heartbeat.json")}  # fmt: skip
    return {**files, **{name: (run / name).read_bytes() for name in CONFIG}}


def ok(*words: object) -> Said:
    return m4(*words).ok()


def test_a_trial_has_a_folder_of_its_own_and_damages_nothing(run: Path) -> None:
    for path in (run / "decodes").glob("test.*.jsonl"):
        os.utime(path, (981_200_000, 981_200_000))
    ok("report", f"--model_dir={run}")
    # A day is that of the translations: a page that is made after midnight is the same.
    assert "<td>2001-02-03</td>" in (run / "report.html").read_text()
    ended = state(run)
    ok("eval", f"--model_dir={run}")
    assert state(run) == ended  # the same rows, of baselines too
    said = ok("eval", f"--model_dir={run}", "--gin.experiment.Decoding.beams=1")
    trial = run / "decodes" / "beams=1"
    assert str(trial / "scores.jsonl") in said.out
    rows = read_jsonl(trial / "scores.jsonl")
    assert {row["config"] for row in rows if row["system"] == "moe"} == {
        f"{trial}/operative_config.gin"
    }
    assert "Decoding.beams = 1\n" in (trial / "operative_config.gin").read_text()
    # Baselines have two beams: they are left out, with the commands that compare.
    assert {row["system"] for row in rows} == {"moe", "copy"}
    (line,) = (line for line in said.err.splitlines() if line.startswith("bilingual"))
    assert "not translated with this command's settings" in line
    for command in line.partition("(")[2].rstrip(")").split(" && "):
        ok(*shlex.split(command)[1:])
    assert state(run) == ended
    for job in ("report", "eval"):  # as they are without the trial
        ok(job, run)
    assert state(run) == ended
    systems = {row["system"] for row in read_jsonl(trial / "scores.jsonl")}
    assert systems == {"moe", "bilingual", "copy"}
    assert (trial / "report.html").is_file()
    said = m4("report", run, trial, f"--baseline={run}", "--output=both")
    assert f"{trial}/test.en-es.jsonl was translated with beams = 1, not 2 as" in said.mistake


@pytest.mark.thorough
def test_training_alone_writes_the_config(run: Path) -> None:
    """Then its settings are the run's, and translations of the old ones are not scored with new."""
    ok("train", f"--model_dir={run}", "--gin.experiment.Decoding.alpha=0.7")
    assert "Decoding.alpha = 0.7" in (run / "config.gin").read_text()
    assert "was translated with alpha = 0.6, not 0.7" in m4("report", f"--model_dir={run}").mistake
    said = ok("eval", f"--model_dir={run}")
    assert "bilingual baselines are left out" in said.err
    assert {row["system"] for row in read_jsonl(run / "scores.jsonl")} == {"moe", "copy"}
    ok("baselines", f"--model_dir={run}")
    ok("report", f"--model_dir={run}")
    rows = read_jsonl(run / "scores.jsonl")
    assert {row["system"] for row in rows} == {"moe", "bilingual", "copy"}


def test_a_folder_without_a_run_gets_none(tmp_path: Path) -> None:
    for job in ("eval", "decode", "score"):
        said = m4(job, f"--gin_file={TINY}", f"--model_dir={tmp_path}/run")
        assert f"{tmp_path}/run: not a run's folder (no run.json); train first" in said.mistake
    assert not (tmp_path / "run").exists()


def test_flags_of_a_trial(run: Path) -> None:
    before = state(run)
    said = ok("eval", run, "--beams=1", "--sentences=4")
    trial = run / "decodes" / "beams=1"
    assert str(trial / "scores.test4.jsonl") in said.out
    rows = read_jsonl(trial / "scores.test4.jsonl")
    assert {row["sentences"] for row in rows if row["subset"] == "all"} == {4}
    # Fewer sentences by the run's own search have names of their own next to the others.
    ok("eval", run, "--sentences=4")
    new = state(run).keys() - before.keys()
    assert "scores.test4.jsonl" in new
    assert all("test4." in name for name in new)
    assert {name: said for name, said in state(run).items() if name not in new} == before


def test_a_trial_by_step_leaves_the_runs_curve(run: Path) -> None:
    ok("eval", run, "--steps=4", "--sentences=3")
    before = state(run)
    ok("eval", run, "--steps=4", "--sentences=3", "--beams=1")
    assert state(run) == before
    trial = run / "decodes" / "beams=1"
    assert (trial / "4" / "scores.test3.jsonl").is_file()
    assert {row["step"] for row in read_jsonl(trial / "scores_by_step.jsonl")} == {4}
