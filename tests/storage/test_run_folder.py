"""A run's folder: one config, one job at a time, and never lost by a mistake."""

import json
import re
from pathlib import Path

import pytest

from m4.storage import run_folder
from tests.storage.conftest import Capture, config_of

CONFIG = {"MODEL_DIR": "'m'", "TRAIN_STEPS": "10", "transformer.Transformer.width": "64"}


def claimed(folder: Path, config: dict[str, str] = CONFIG) -> Path:
    """Claims a folder in which a job has left work."""
    folder.mkdir(exist_ok=True)
    run_folder.claim(folder, **config_of(config, "text of the config\n"))
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "note.json").touch()
    return folder


def test_claim_records_what_made_the_folder(tmp_path: Path) -> None:
    folder = claimed(tmp_path / "model")
    about = run_folder.read(folder)
    assert about["config"] == CONFIG
    assert about["versions"]["jax"][0].isdecimal()
    assert about["machine"]
    assert (folder / "config.gin").read_text() == "text of the config\n"
    json.loads((folder / "run.json").read_text())


def test_mutable_settings_may_change(tmp_path: Path) -> None:
    folder = claimed(tmp_path / "model")
    longer = {**CONFIG, "TRAIN_STEPS": "30"}
    run_folder.claim(folder, **config_of(longer, mutable=["TRAIN_STEPS"]))
    assert run_folder.read(folder)["config"] == longer
    # What was mutable there may be left out here.
    left_out = {k: v for k, v in CONFIG.items() if k != "TRAIN_STEPS"}
    run_folder.claim(folder, **config_of(left_out))
    with pytest.raises(ValueError, match="TRAIN_STEPS is not set there and 30 here"):
        run_folder.claim(folder, **config_of(longer))


def test_another_config_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    folder = claimed(tmp_path / "model")
    other = {
        **CONFIG,
        "transformer.Transformer.width": "128",
        **{f"cldr.Cldr.{name}": "1" for name in ("seed", "largest", "smallest")},
    }
    with pytest.raises(ValueError, match="belongs to another config") as error:
        run_folder.claim(folder, **config_of(other))
    said = str(error.value)  # three of four differences are shown
    assert "transformer.Transformer.width is 64 there and 128 here; cldr.Cldr.seed is not" in said
    assert "(and 1 more)" in said
    assert (folder / "config.gin").read_text() == "text of the config\n"
    with pytest.raises(ValueError, match="width is 64 there and not set here"):
        run_folder.check(folder, {"TRAIN_STEPS": "10"}, ["MODEL_DIR"])


def test_folder_without_results_may_be_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    run_folder.claim(folder, **config_of(CONFIG))
    (folder / "compilation_cache").mkdir()
    (folder / "data").mkdir()
    run_folder.note(folder, initial={"run": "old", "step": 4})
    run_folder.claim(folder, **config_of(CONFIG))
    assert run_folder.read(folder)["initial"] == {"run": "old", "step": 4}
    other = {**CONFIG, "transformer.Transformer.width": "128"}
    run_folder.claim(folder, **config_of(other))
    assert run_folder.read(folder)["config"] == other
    assert "initial" not in run_folder.read(folder)  # an entry of the earlier run


def test_only_a_runs_folder_is_removed_or_claimed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ValueError, match="not empty and not a run's folder"):
        run_folder.claim(tmp_path / "photos", **config_of(CONFIG))
    for use in (run_folder.start_over, run_folder.read):
        with pytest.raises(ValueError, match=r"photos: not .*a run's folder"):
            use(tmp_path / "photos")
    assert (tmp_path / "photos" / "cat.jpg").is_file()


def test_fresh_removes_what_m4_wrote_and_lists_it_before(tmp_path: Path, capsys: Capture) -> None:
    folder, elsewhere = claimed(tmp_path / "model"), tmp_path / "large_disk"
    for path in (folder / "corpus", folder / "decodes", folder / "data", elsewhere):
        path.mkdir()
    (elsewhere / "precious").touch()
    (folder / "tensorboard").symlink_to(elsewhere)
    for name in ("notes.txt", "corpus/gl.train.tsv", "metrics.jsonl", "scores.dev.jsonl"):
        (folder / name).touch()
    went = run_folder.start_over(folder)
    assert capsys.readouterr().out == (
        f"--fresh: removed from {folder}: checkpoints, config.gin, decodes, metrics.jsonl, "
        "operative_config.gin, run.json, scores.dev.jsonl, tensorboard; stays: corpus, notes.txt\n"
    )
    assert {path.name for path in folder.iterdir()} == {"corpus", "data", "notes.txt"}
    assert (folder / "corpus" / "gl.train.tsv").is_file()
    assert (elsewhere / "precious").is_file()  # only the link goes
    assert went("decodes/test.en-gl.jsonl")
    assert not went("data/1/manifest.json")


def test_fresh_knows_every_file_of_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "run_folder.md"
    rows = re.findall(r"^\| (`.*?) \|", page.read_text().split("\n## ")[0], re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([\w.<>-]+)[^`]*`", row)]
    ours = [name.replace("<split>", "test") for name in names if not name.startswith(".")]
    assert len(ours) > 25
    assert [name for name in ours if not run_folder._WRITTEN.fullmatch(name)] == ["data"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("run.json", "train"),
        ("compilation_cache/eval/a-cache", "eval"),
        ("decodes/beams=1,n_best=2/scores.jsonl", "eval"),
        ("decodes/beams=1/1000/scores.jsonl", "steps"),
        ("scores.test20.jsonl", "eval"),
        ("zero_shot/scores.jsonl", "eval"),
        ("scores_by_step.jsonl", "steps"),
        ("baselines/gl.1/result.json", "baselines"),
        ("data_preview.json", "data"),
    ],
)
def test_each_file_is_of_the_kind_of_the_job_that_writes_it(name: str, kind: str) -> None:
    assert run_folder.kind_of(name) == kind


def test_other_processes_must_see_the_same_folder(tmp_path: Path) -> None:
    here, elsewhere = claimed(tmp_path / "here"), claimed(tmp_path / "elsewhere", {"A": "1"})
    run_folder.check_shared(here, run_folder.digest(here), "there", seconds=0)
    for folder in (elsewhere, tmp_path / "empty"):
        with pytest.raises(ValueError, match="one folder that all processes share"):
            run_folder.check_shared(folder, run_folder.digest(here), "there", seconds=0)
