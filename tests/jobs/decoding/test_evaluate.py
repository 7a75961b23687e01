"""`m4 eval --watch` and `--steps`: each checkpoint scored once, as it appears, by one program."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from m4.eval.decoding.testsets import Portion
from m4.eval.report import curves, figures
from m4.eval.scoring.score import System, read_by_step
from m4.jobs.decoding import evaluate as follow
from m4.jobs.decoding.evaluate import _task_metrics
from m4.storage.checkpoints import Checkpoints
from m4.storage.files import read_jsonl, write_jsonl
from m4.storage.locks import local_lock
from tests.command_line import Said, m4

COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: COMPILES.append(event) if "backend_compile" in event else None
)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Returns a copy of the run without its checkpoints."""
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "run" / "checkpoints").mkdir()
    return tmp_path / "run"


def meanwhile(monkeypatch: pytest.MonkeyPatch, *events: Callable[[], object]) -> None:
    """Sets the events while the job waits; after the last one it may not look again."""
    later = iter(events)
    monkeypatch.setattr(follow, "_sleep", lambda _: next(later)())


def save(trained: Path, run: Path, *steps: int) -> Callable[[], object]:
    def put() -> None:
        for step in steps:
            shutil.copytree(trained / "checkpoints" / str(step), run / "checkpoints" / str(step))

    return put


def watched(run: Path, *arguments: str) -> Said:
    return m4("eval", f"--model_dir={run}", "--watch", "--sentences=2", *arguments)


def test_each_new_checkpoint_is_scored_once_by_one_program(
    trained: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[int] = []

    def later(*steps: int) -> Callable[[], object]:
        def put() -> None:
            programs.append(len(COMPILES))
            save(trained, run, *steps)()

        return put

    # Training works in the folder all the time.
    with local_lock(run / ".lock.train", ""):
        meanwhile(monkeypatch, lambda: None, later(1), lambda: None, later(2, 3))
        said = watched(run, "--directions=en-gl,gl-en").ok()
    first, *others = said.out.splitlines()
    assert first == f"{run}: no checkpoint yet; waiting for the first"
    lines = [line for line in others if line.startswith("step")]
    assert not [line for line in others if "waiting" in line]
    assert [line.split(": ")[0] for line in lines] == [f"step {n} dev2" for n in (1, 2, 3)]
    assert len(COMPILES) == programs[1] > programs[0]  # step 1 compiled for all

    rows = read_by_step(run / "scores_by_step.jsonl")
    assert [(r["step"], r["level"]) for r in rows if r["metric"] == "chrf"] == [
        (step, level) for step in (1, 2, 3) for level in ("low", "all")
    ]  # gl is low-resource
    for row in rows:
        scores = read_jsonl(run / "decodes" / str(row["step"]) / "scores.dev2.jsonl")
        values = [each["score"] for each in scores
                  if (each["system"], each["metric"]) == ("moe", row["metric"])]  # fmt: skip
        assert row["score"] == pytest.approx(sum(values) / 2, abs=1e-6)
        assert {each["checkpoint_step"] for each in scores} == {row["step"], None}  # None: copy
        assert {each["sentences"] for each in scores} == {2}
    figures.save(curves.by_step(rows), [run / "again.png"])
    assert (run / "again.png").read_bytes() == (run / "scores_by_step.dev2.png").read_bytes()

    # Again, without the checkpoints: nothing is translated or scored.
    shutil.rmtree(run / "checkpoints" / "1")
    before = (run / "scores_by_step.jsonl").read_bytes()
    monkeypatch.setattr(follow.testsets.PortionDecoder, "decode", lambda *_: pytest.fail("again"))
    meanwhile(monkeypatch)
    watched(run, "--directions=en-gl,gl-en").ok()
    assert (run / "scores_by_step.jsonl").read_bytes() == before


def test_interrupted_it_resumes_where_it_was(
    trained: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c() -> None:
        raise KeyboardInterrupt

    meanwhile(monkeypatch, save(trained, run, 1), ctrl_c)
    said = watched(run, "--directions=en-gl")
    assert said.status == 130
    assert said.err.splitlines()[-1] == "m4 eval: interrupted; run the same command to resume"
    save(trained, run, 3)()
    meanwhile(monkeypatch)
    assert [line.split(" ")[1] for line in watched(run, "--directions=en-gl").out.splitlines()
            if line.startswith("step")] == ["3"]  # fmt: skip
    assert [row["step"] for row in read_by_step(run / "scores_by_step.jsonl")
            if (row["metric"], row["level"]) == ("bleu", "all")] == [1, 3]  # fmt: skip


@pytest.mark.parametrize("reading", ["note", "restore"])
def test_checkpoints_that_are_deleted_meanwhile_are_lines(
    trained: Path, run: Path, monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    read = getattr(Checkpoints, reading)

    def deleted_in_between(self: Checkpoints, step: int, *rest: object) -> object:
        if step == 1:
            for gone in (1, 2):
                shutil.rmtree(run / "checkpoints" / str(gone))
        return read(self, step, *rest)

    save(trained, run, 1, 2, 3)()
    monkeypatch.setattr(Checkpoints, reading, deleted_in_between)
    meanwhile(monkeypatch)
    said = watched(run, "--directions=en-gl").ok()
    one, two, three, _ = [line for line in said.out.splitlines() if "step" in line]
    assert one.startswith(f"step 1: {run}/checkpoints/1: was removed while it was read")
    assert two == "step 2: deleted before it was scored (Training.keep_checkpoints)"
    assert three.startswith("step 3 dev2: BLEU")


def test_a_damaged_checkpoint_is_a_line_and_the_others_are_scored(
    trained: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(trained, run, 1, 3)()
    (run / "checkpoints" / "1" / "note" / "metadata").write_text("{}")
    meanwhile(monkeypatch)
    said = watched(run, "--directions=en-gl")
    line = f"{run}/checkpoints/1: damaged (note/metadata"
    assert said.out.startswith(f"step 1: {line}")
    assert said.status == 2
    assert said.err.splitlines()[-1].startswith(f"m4 eval: {line}")
    assert [row["step"] for row in read_by_step(run / "scores_by_step.jsonl") if row["best"]] == [3]


def test_a_run_that_was_made_longer_is_followed_on(
    trained: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beat(phase: str, age: float = 0.0) -> Callable[[], object]:
        said = {"step": 3, "phase": phase, "time": follow.time.time() - age, "started": 0.0}
        return lambda: (run / "heartbeat.json").write_text(json.dumps(said))

    save(trained, run, 3)()
    for last in (beat("end"), beat("step", age=1000.0)):  # it ends, or is killed
        beat("step")()  # step 3 was the last one, and training works again
        meanwhile(monkeypatch, last)
        watched(run, "--directions=en-gl").ok()


def test_steps_that_are_there_are_scored_without_waiting(
    trained: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(trained, run, 1, 2, 3)()
    meanwhile(monkeypatch)
    for steps, scored in (("3,1", ["1", "3"]), ("all", ["2"])):
        said = m4("eval", f"--model_dir={run}", f"--steps={steps}", "--sentences=1",
                  "--directions=en-gl")  # fmt: skip
        lines = [line for line in said.out.splitlines() if line.startswith("step")]
        assert [line.split(" ")[1] for line in lines] == scored
        assert all(" test1: " in line for line in lines)


def test_mistakes_are_one_line(trained: Path, run: Path) -> None:
    def mistake(*arguments: str) -> str:
        return m4("eval", f"--model_dir={run}", *arguments).mistake

    assert "no checkpoints; train first" in mistake("--steps=all")
    save(trained, run, 1)()
    assert "no checkpoint of step 7; there are 1" in mistake("--steps=1,7")
    assert "--directions: no en-fr; there are " in mistake("--steps=1", "--directions=en-fr")
    assert "--seconds=0.0: must be above 0" in mistake("--watch", "--seconds=0")
    assert "--steps=1: --watch scores all" in mistake("--watch", "--steps=1")
    assert "--directions: give --watch or --steps, too" in mistake("--directions=en-gl")
    (run / "scores_by_step.jsonl").write_text('{"split": "dev"}\n')
    assert "scores_by_step.jsonl line 1: damaged (" in mistake("--steps=1", "--directions=en-gl")


# -------- the metrics of a source's own tasks


def test_metrics_are_of_the_sentences_that_were_translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"text {number}" for number in range(12)]
    chosen = Portion("test", test_sentences=3).chosen(range(12))
    rows = [{"source": "a", "reference": "b", "hypothesis": texts[n]} for n in chosen]
    write_jsonl(tmp_path / "test.en-gl.jsonl", rows)

    def task_metrics(direction: str, split: str, sentences: int, predictions: Any) -> Any:
        assert (direction, split) == ("en-gl", "test")
        if sentences != known:
            return None
        return {"right": sum(texts[n] == text for n, text in predictions.items())}

    source = SimpleNamespace(task_metrics=task_metrics)
    corpus = SimpleNamespace(opened_source=source)
    experiment: Any = SimpleNamespace(data=SimpleNamespace(corpus=corpus))
    cache: Any = SimpleNamespace(directions=["en-gl"], size=lambda language, split: 12)
    system = System("moe", tmp_path, checkpoint_step=7)
    given = (
        experiment, cache, system, Portion("test", test_sentences=3), tmp_path / "scores.jsonl",
    )  # fmt: skip
    known = 12
    assert _task_metrics(*given) == [path := tmp_path / "task_metrics.jsonl"]
    of = {"direction": "en-gl", "split": "test", "checkpoint_step": 7}
    assert read_jsonl(path) == [{**of, "right": 3}]
    # Without a row there is no file, also no older one, and none is announced.
    known = 13
    assert _task_metrics(*given) == []
    assert not path.exists()
    assert "no task_metrics.jsonl: cleaning left out examples" in capsys.readouterr().out
