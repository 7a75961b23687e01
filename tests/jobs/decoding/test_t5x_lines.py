"""`m4 decode --format=t5x`: lines as T5X's inference writes them."""

import json
import shutil
from pathlib import Path

import pytest

from m4.data import tasks
from m4.eval.decoding.decode import Translations
from m4.eval.decoding.t5x_lines import t5x_line
from m4.storage.files import read_jsonl
from tests.command_line import m4


def test_the_best_of_several_comes_last_as_in_t5x() -> None:
    one = t5x_line("3 weeks ago", Translations(["hai"], [-1.0]), "gl")
    assert json.loads(one) == {
        "inputs": {"inputs_pretokenized": "<2gl> 3 weeks ago"},
        "prediction": "hai",
    }
    several = t5x_line("a", Translations(["best", "second"], [-1.0, -2.0]), "gl")
    assert json.loads(several) == {
        "inputs": {"inputs_pretokenized": "<2gl> a"},
        "prediction": ["second", "best"],
        "aux": {"scores": [-2.0, -1.0]},
    }


@pytest.mark.slow
@pytest.mark.parametrize("n_best", [1, 2])
def test_test_sets_become_files_of_tasks(trained: Path, tmp_path: Path, n_best: int) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    best = f"--gin.experiment.Decoding.n_best={n_best}"
    m4("decode", f"--model_dir={run}", "--format=t5x", "--split=dev", best).ok()
    mode = "predict" if n_best == 1 else "predict_with_aux"
    decodes = run / "decodes" / ("" if n_best == 1 else "n_best=2")  # a trial's are its own
    folder = decodes / "t5x"
    name = f"{tasks.task_name('en-gl')}_dev-{mode}.jsonl-00000-of-00001"
    assert (folder / f"{name}.COMPLETED").read_bytes() == b""
    rows = read_jsonl(folder / name)
    kept = read_jsonl(decodes / "dev.en-gl.jsonl")
    assert len(rows) == len(kept) > 0
    for row, own in zip(rows, kept, strict=True):
        assert row["inputs"] == {
            "inputs_pretokenized": f"<2gl> {own['source']}",
            "targets_pretokenized": own["reference"],
        }
        best_one = row["prediction"] if n_best == 1 else row["prediction"][-1]
        assert best_one == own["hypothesis"]


def test_text_becomes_lines_and_formats_are_not_mixed(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("3 weeks ago\nMonday\n")
    given = (
        "decode", f"--model_dir={trained}", f"--input={tmp_path / 'in.txt'}", "--to=gl",
        f"--output={tmp_path / 'out.jsonl'}", "--format=t5x",
    )  # fmt: skip
    assert "not with --json" in m4(*given, "--json").mistake
    assert not (tmp_path / "out.jsonl").exists()
    m4(*given).ok()
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert [row["inputs"]["inputs_pretokenized"] for row in rows] == [
        "<2gl> 3 weeks ago",
        "<2gl> Monday",
    ]
    assert all(isinstance(row["prediction"], str) for row in rows)
