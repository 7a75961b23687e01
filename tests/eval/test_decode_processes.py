"""`m4 eval` as two processes: the translations and scores of one, written by the first."""

import shutil
from pathlib import Path

import pytest

from tests.command_line import TINY, contents, m4
from tests.train.loop.job import Job, started


def together(log: Path, *words: str) -> list[str]:
    """Returns the output of each of two processes of two devices; both must succeed."""
    with started(Job(log, 2, 2, words=words)) as job:
        assert job.statuses(400) == [0, 0], job.said()
        return job.said()


@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_translate_as_one_does(tmp_path: Path) -> None:
    alone, two = tmp_path / "alone", tmp_path / "two"
    m4("train", f"--gin_file={TINY}", f"--model_dir={alone}", "--gin.TRAIN_STEPS=2").ok()
    shutil.copytree(alone, two)
    # Over the eight devices of the test's own process.
    m4("eval", f"--model_dir={alone}").ok()
    # One direction is there already: all processes must know, and it stays as it is.
    done = two / "decodes" / "test.en-gl.jsonl"
    done.parent.mkdir()
    for path in (done, done.with_suffix(".json")):
        shutil.copy2(alone / "decodes" / path.name, path)
    before = done.stat().st_mtime_ns

    # Experts on the two devices of each process, rows over both.
    mesh = ("--gin.mesh.make_mesh.data=2", "--gin.mesh.make_mesh.expert=2")
    first, second = together(tmp_path / "log", "eval", f"--model_dir={two}", *mesh)
    assert "decode test: 72/72 sentences" in first
    assert "scores.jsonl" in first
    assert "decode" not in second
    assert "scores" not in second
    assert done.stat().st_mtime_ns == before
    expected, found = contents(alone / "decodes"), contents(two / "decodes")
    # Routing is counted of what is translated, so not of that direction.
    assert expected.pop("atlas.test.json") != found.pop("atlas.test.json")
    assert found == expected
    assert len(found) == 12  # a file and its note a direction

    # Text: the first process writes, and both know what of it is there already.
    (tmp_path / "in.txt").write_text("3 weeks ago\n\n" + "Monday. Tuesday! " * 9 + "\n")
    there = tmp_path / "out" / "in.gl.txt"
    for path in (tmp_path / "one", there.parent):
        path.mkdir()
    request = ["decode", f"--input={tmp_path}/in.txt"]
    m4(*request, f"--model_dir={alone}", "--to=gl,es", f"--output={tmp_path}/one").ok()
    there.write_text("there\n")
    more = (f"--model_dir={two}", "--to=gl,es", f"--output={there.parent}", *mesh)
    first, second = together(tmp_path / "log", *request, *more)
    assert "in.gl.txt: already there" in first
    assert "line 3" in first
    assert "line 3" not in second
    assert there.read_text() == "there\n"
    assert (there.parent / "in.es.txt").read_bytes() == (tmp_path / "one/in.es.txt").read_bytes()
