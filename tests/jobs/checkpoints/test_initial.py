"""A run that begins from another run's model (`m4 train --init_from`)."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from m4.data.cache.cache import Cache
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import read_metrics
from tests.command_line import TINY, Said, m4
from tests.train.trainers import timeless_rows


def train(folder: Path, *arguments: object) -> Said:
    """Trains in `folder`, which is in a test's own folder; tests of a process share corpora."""
    data = f"--gin.experiment.Data.data_dir='{folder.parents[1] / 'corpora'}'"
    return m4("train", f"--gin_file={TINY}", f"--model_dir={folder}", data, *arguments)


def saved(folder: Path, step: int | None = None, item: str = "params") -> Any:
    """Returns the arrays of a checkpoint, by default of the latest."""
    steps = [int(path.name) for path in (folder / "checkpoints").glob("[0-9]*")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # shardings are those of the file
        path = folder / "checkpoints" / str(max(steps) if step is None else step) / item
        return ocp.PyTreeCheckpointer().restore(path)


def assert_equal(one: Path, other: Path, step: int) -> None:
    for item in ("params", "optimizer"):
        a, b = saved(one, step, item), saved(other, step, item)
        assert jax.tree.all(jax.tree.map(np.array_equal, a, b)), item


def test_nothing_is_lost_where_nothing_changed(first: Path, tmp_path: Path) -> None:
    said = train(tmp_path / "run", f"--init_from={first}", "--gin.TRAIN_STEPS=2").ok()
    assert "at step 4: " in said.out
    assert "  its dev/nll at step 4 was " in said.out
    assert "before the first step: " in said.out
    before = next(row for row in read_metrics(first)[::-1] if "dev/nll" in row)
    now = read_metrics(tmp_path / "run")[0]
    assert now["step"] == 0
    assert {n: v for n, v in now.items() if n != "step"} == {
        n: v for n, v in before.items() if n != "step"
    }
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["initial"]
    assert (kept["run"], kept["step"], kept["left"]) == (str(first), 4, [])
    assert kept["taken"] == len(jax.tree.leaves(saved(first)))


def test_weights_and_optimizer_continue_as_if_never_interrupted(
    first: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    said = train(run, f"--init_from={first}@2", "--keep_optimizer").ok()
    assert "its dev/nll" not in said.out  # which was measured at step 4, later
    assert "the optimizer's state: kept" in said.out
    assert_equal(first, run, 4)
    early = train(
        tmp_path / "early", f"--init_from={first}", "--keep_optimizer", "--gin.TRAIN_STEPS=3"
    )
    assert "must be 4 or more, where the run continues" in early.mistake


CHANGES = (
    *("--gin.schedules.rsqrt.peak=5e-4", "--gin.BATCH_SIZE=16", "--gin.TRAIN_STEPS=8"),
    "--gin.experiment.Training.learning_rates={'gl': 2.0}",  # the old state has none
)


@pytest.mark.thorough
def test_a_changed_recipe_continues_in_a_new_folder(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin = (f"--init_from={first}", "--keep_optimizer", *CHANGES)
    said = train(run, *begin).ok()
    assert "  training.optimizer.schedule.peak: 0.001 -> 0.0005" in said.out
    assert read_metrics(run)[0]["step"] == 4
    about = json.loads((run / "run.json").read_text())["initial"]
    assert (about["run"], about["step"]) == (str(first), 4)
    assert about["changes"] == {
        "training.optimizer.schedule.peak": ["0.001", "0.0005"],
        "training.batch_size": ["8", "16"],
        "training.learning_rates": ["None", "{'gl': 2.0}"],
    }
    # As if it had been killed after its first checkpoint.
    killed = Path(shutil.copytree(run, tmp_path / "killed"))
    shutil.rmtree(killed / "checkpoints" / "8")
    assert "begins from" not in train(killed, *begin).ok().out
    assert_equal(run, killed, 8)
    assert timeless_rows(run) == timeless_rows(killed)


@pytest.mark.thorough
def test_an_optimizer_with_other_arrays_begins_from_zero(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = train(
        run, f"--init_from={first}", "--keep_optimizer", "--gin.TRAIN_STEPS=6",
        "--gin.experiment.Training.optimizer=@optimizer.muon",
        "--gin.optimizer.muon.schedule=@schedules.rsqrt",
    ).ok()  # fmt: skip
    assert "the optimizer's state: from zero" in said.out
    # Its learning rate is that of the step all the same.
    counts = [int(x) for x in jax.tree.leaves(saved(run, 6, "optimizer")) if x.ndim == 0]
    assert {*counts} == {2, 6}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "grown",
    [
        (
            "--gin.cldr.Cldr.sizes={'el': 80, 'es': 150, 'pt': 100, 'gl': 60}",
            "--gin.corpus.CorpusSpec.vocabulary_from={first!r}",
            "--gin.corpus.CorpusSpec.vocabulary_size=520",
        ),
        ("--gin.moe.MoeLayer.num_experts=8",),
    ],
)
def test_an_optimizer_keeps_what_it_has_where_arrays_grow(
    grown: tuple[str, ...], first: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    given = [one.replace("{first!r}", repr(str(first))) for one in grown]
    said = train(
        run, f"--init_from={first}", "--keep_optimizer", "--gin.TRAIN_STEPS=4", *given
    ).ok()
    assert "the optimizer's state: kept, grown" in said.out
    was, now = (jax.tree.leaves(saved(folder, 4, "optimizer")) for folder in (first, run))
    for old, new in zip(was, now, strict=True):
        assert np.array_equal(old, new[tuple(slice(size) for size in old.shape)])


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [(np.float32, np.nan, "has 1 values that are not finite"),
     (np.int32, 3, "has numbers of type int32: must be floats")],
)  # fmt: skip
def test_weights_of_another_run_are_finite_floats(
    dtype: type, value: float, said: str, first: Path, tmp_path: Path
) -> None:
    """Whoever reads them: a run that begins from them, resumes, or translates with them."""
    other = shutil.copytree(first, tmp_path / "other")
    params, optimizer = saved(other, 4), saved(other, 4, "optimizer")
    table = np.asarray(params["token_embedder"]["embedding"]).astype(dtype)
    table[5, 3] = value
    params["token_embedder"]["embedding"] = jnp.asarray(table)
    with Checkpoints(other / "checkpoints") as store:
        store.save(5, {"params": params, "optimizer": optimizer}, store.note(4))
    place = f"{other}/checkpoints/5: token_embedder/embedding {said}"
    assert place in train(tmp_path / "new", f"--init_from={other}", "--gin.TRAIN_STEPS=0").mistake
    assert not [*(tmp_path / "new" / "checkpoints").glob("[0-9]*")]
    export = ("export", "--format=t5x", f"--output={tmp_path / 'out'}")
    for words in (("decode",), ("translate", "--to=gl", "x"), ("score",), export):
        found = m4(*words, f"--model_dir={other}").mistake
        assert f"token_embedder/embedding {said}" in found, words
    if dtype is np.int32:  # what is not finite the guard of bad steps sees
        assert place in m4("train", f"--model_dir={other}", "--gin.TRAIN_STEPS=6").mistake


def test_another_runs_config_imports_what_is_allowed(first: Path, tmp_path: Path) -> None:
    other = shutil.copytree(first, tmp_path / "other")
    (tmp_path / "stranger.py").write_text("print('its code runs')\n")
    with (other / "config.gin").open("a") as config:
        config.write("import stranger\n")
    begin = (f"--init_from={other}", "--gin.TRAIN_STEPS=0")
    mistake = train(tmp_path / "run", *begin).mistake
    assert "imports stranger, which is not part of m4" in mistake
    assert not (tmp_path / "run" / "checkpoints").exists()
    said = train(tmp_path / "run", *begin, f"--allow_module=stranger={tmp_path}").ok()
    assert "its code runs" in said.out


def test_a_language_more_keeps_old_rows(first: Path, tmp_path: Path) -> None:
    said = train(
        tmp_path / "run", f"--init_from={first}", "--gin.TRAIN_STEPS=0",
        "--gin.cldr.Cldr.sizes={'es': 150, 'gl': 60, 'el': 80}",
        f"--gin.corpus.CorpusSpec.vocabulary_from={str(first)!r}",
        "--gin.corpus.CorpusSpec.vocabulary_size=440",
    ).ok()  # fmt: skip
    assert "40 new pieces (bytes)" in said.out
    was, now = (p["token_embedder"]["embedding"] for p in (saved(first), saved(tmp_path / "run")))
    assert np.array_equal(was[:400], now[:400])
    assert np.isfinite(now).all()


@pytest.mark.thorough
def test_a_language_less_keeps_the_vocabulary(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(
        run, f"--init_from={first}", "--gin.TRAIN_STEPS=0",
        "--gin.cldr.Cldr.sizes={'es': 150, 'pt': 100}",
        f"--gin.experiment.Data.data_dir='{tmp_path}/data'",
        f"--gin.corpus.CorpusSpec.vocabulary_from={str(first)!r}",
    ).ok()  # fmt: skip
    assert jax.tree.all(jax.tree.map(np.array_equal, saved(first), saved(run)))
    was, now = (Cache(folder / "vocabulary").source_vocabulary for folder in (first, run))
    assert now.pieces == was.pieces
    corpus = Cache(next((tmp_path / "data").glob("*/manifest.json")).parent)
    assert sorted(corpus.directions) == ["en-es", "en-pt", "es-en", "pt-en"]


def test_dense_to_experts_and_what_is_refused(first: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    train(dense, "--gin.transformer.Transformer.moe=None", "--gin.TRAIN_STEPS=2").ok()
    said = train(tmp_path / "experts", f"--init_from={dense}", "--gin.TRAIN_STEPS=0")
    assert "upcycled: 4 (" in said.ok().out
    # Later steps of the same training, with experts.
    later = ("--keep_optimizer", "--gin.TRAIN_STEPS=4", "--gin.optimizer.adamw.experts_every=2")
    said = train(tmp_path / "later", f"--init_from={dense}", *later)
    assert "the optimizer's state: from zero" in said.ok().out
    assert [row["step"] for row in read_metrics(tmp_path / "later") if "loss" in row] == [4]
    was, now = (
        read_metrics(folder)[row]["dev/nll"]
        for folder, row in ((dense, -1), (tmp_path / "experts", 0))
    )
    np.testing.assert_allclose(now, was, rtol=1e-5)

    positions = "transformer.Transformer.absolute_positions"
    data = f"--gin.experiment.Data.data_dir='{tmp_path}/data'"
    for run, more, mistake in (
        (first, "--gin.transformer.Transformer.mlp_width=48", "[4, 16, 48] here and [4, 16, 32]"),
        (first, f"--gin.{positions}=True", f"{positions} = True: must be False, as in {first}"),
        (tmp_path / "nothing", "--gin.TRAIN_STEPS=4", "a T5X or a Hugging Face checkpoint"),
        (f"{first}@3", "--gin.TRAIN_STEPS=4", "no checkpoint of step 3"),
    ):
        assert mistake in train(tmp_path / "no", f"--init_from={run}", more, data).mistake
    assert not (tmp_path / "data").exists()  # known before the corpus is built
    other = "--gin.cldr.Cldr.sizes={'es': 150, 'el': 80}"
    mistake = train(tmp_path / "no", f"--init_from={first}", other).mistake
    assert "CorpusSpec.vocabulary_from takes that run's" in mistake


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("binding", "rule"),
    [("moe.MoeLayer.num_experts=2", "most used experts"),
     ("transformer.Transformer.moe=None", "merged experts")],
)  # fmt: skip
def test_another_number_of_experts_by_a_named_rule(
    first: Path, tmp_path: Path, binding: str, rule: str
) -> None:
    said = train(
        tmp_path / "run", f"--init_from={first}", f"--gin.{binding}", "--gin.TRAIN_STEPS=0"
    ).ok()
    assert f"{rule}: " in said.out
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["initial"]
    assert kept[rule]
    assert np.isfinite(read_metrics(tmp_path / "run")[0]["dev/nll"])


def test_a_run_begins_from_the_same_step_until_its_first_checkpoint(
    first: Path, tmp_path: Path
) -> None:
    old, run = Path(shutil.copytree(first, tmp_path / "me@host")), tmp_path / "run"
    last = (old / "checkpoints" / "4").rename(tmp_path / "4")
    begin = (f"--init_from={old}", "--gin.TRAIN_STEPS=0")
    assert "at step 2: " in train(run, *begin).ok().out
    # It is killed before its first checkpoint, and the other run trains on.
    shutil.rmtree(run / "checkpoints")
    last.rename(old / "checkpoints" / "4")
    assert "at step 2: " in train(run, *begin).ok().out
    assert jax.tree.all(jax.tree.map(np.array_equal, saved(old, 2), saved(run)))
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(old / "checkpoints" / "2")
    gone = train(run, *begin).mistake
    assert "no checkpoint of step 2; there are 4; this run began from it (run.json)" in gone
    assert gone.endswith("start over with --fresh")
