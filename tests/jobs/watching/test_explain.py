"""`m4 explain`: the pairs of a bad step by file and line, layer and expert."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.sources import SPLITS
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step
from m4.train.loop.guard import read_bad_steps
from tests.command_line import TINY, Said, m4
from tests.data.corpus import Made

POISON = (3, 17, 30)
BAD = {("gl.train.1.tsv", line) for line in POISON}


def poisoned(folder: Path) -> None:
    """Two shards; in the second some lines are long garbage."""
    made, draw = Made({"gl": 80}), random.Random(1)
    for split in SPLITS:
        lines = [f"{one.english}\t{one.translation}\n" for one in made.pairs("gl", split)]
        half = len(lines) // 2
        for shard, part in enumerate((lines[:half], lines[half:])):
            if split == "train" and shard == 1:
                for line in POISON:
                    garbage = "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(14))
                    part.insert(line - 1, f"{garbage}\t{garbage[::-1]}\n")
            (folder / f"gl.{split}.{shard}.tsv").write_text("".join(part), encoding="utf-8")


def train(run: Path, steps: int) -> Said:
    text = run.parent / "text"
    return m4(
        "train",
        f"--gin_file={TINY}",
        f"--model_dir={run}",
        "--gin.corpus.CorpusSpec.source=@tsv.Tsv()",
        f"--gin.tsv.Tsv.folder='{text}'",
        "--gin.tsv.Tsv.files='{lang}.{split}.*.tsv'",
        "--gin.corpus.CorpusSpec.lengths={'inputs': 80, 'targets': 80}",
        "--gin.transformer.Transformer.tied_logits=False",
        "--gin.experiment.Training.log_period=1",
        f"--gin.TRAIN_STEPS={steps}",
    )


def break_garbage(run: Path) -> None:
    """A checkpoint of step 5 whose embedding has NaN where pieces are in garbage alone."""
    cache = Cache(run / "data")
    flat, offsets = cache.tokens("train", "translation")
    is_bad = [origin in BAD for origin in cache.origins("gl", "train") or []]
    ids: dict[bool, set[int]] = {True: set(), False: set()}
    for row, bad in enumerate(is_bad):
        ids[bad] |= {*flat[offsets[row] : offsets[row + 1]].tolist()}
    with contextlib.closing(Checkpoints(run / "checkpoints", keep=9)) as store:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        found = store.restore(
            4,
            {
                name: jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
                    store._tree(4, name),
                )
                for name in ("params", "optimizer")
            },
        )
        table = np.array(found["params"]["token_embedder"]["embedding"])
        table[sorted(ids[True] - ids[False])] = np.nan
        found["params"]["token_embedder"]["embedding"] = table
        store.save(5, found, {**store.note(4), "step": 5})
        store.wait()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that garbage has stopped, and the line that it ended with."""
    run = tmp_path_factory.mktemp("explain") / "run"
    (run.parent / "text").mkdir()
    poisoned(run.parent / "text")
    assert train(run, 4).status == 0
    break_garbage(run)
    return run, train(run, 12).mistake


def explained(run: Path, *more: str) -> dict[str, Any]:
    said = m4("explain", run, *more)
    assert said.status == 0, said.err
    assert "gl.train." in said.out
    (path,) = run.glob("explain.*.json")
    about = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return about


def test_a_poisoned_shard_that_stops_training_is_named_with_its_lines(
    stopped: tuple[Path, str],
) -> None:
    run, said = stopped
    step = read_bad_steps(run)[0]["step"]
    assert f"step {step}: loss is nan" in said
    assert f"m4 explain {run} --step={step} " in said
    assert latest_step(run / "checkpoints") == step - 1 - (step - 1) % 2 or step == 6
    about = explained(run)
    assert (about["step"], about["was"]) == (step, "loss is nan")
    pairs = about["pairs"]
    assert len(pairs) == about["pairs_in_batch"] > 10
    broken = [pair for pair in pairs if isinstance(pair["loss"], str)]
    assert broken
    assert broken == pairs[: len(broken)]  # in front of all others
    assert {(pair["file"], pair["line"]) for pair in broken} <= BAD
    assert not {(pair["file"], pair["line"]) for pair in pairs[len(broken) :]} & BAD
    assert {pair["gradient_norm"] for pair in broken} == {"nan"}
    assert {pair["worst_layer"] for pair in broken} <= {"token_embedder", "decoder_token_embedder"}
    for pair in pairs:
        text = (run.parent / "text" / pair["file"]).read_text(encoding="utf-8")
        line = text.split("\n")[pair["line"] - 1]
        assert line == f"{pair['english']}\t{pair['translation']}"
    whole = [pair for pair in pairs if not isinstance(pair["loss"], str)]
    assert all(0 <= pair["worst_expert"] < 4 and "/moe" in pair["worst_moe"] for pair in whole)


@pytest.mark.thorough
def test_a_step_that_is_taken_again_has_its_numbers(stopped: tuple[Path, str]) -> None:
    """Step 4, from the checkpoint of step 2; gradients of as many pairs as are asked for."""
    about = explained(stopped[0], "--step=4", "--replay", "--pairs=2")
    assert about["parameters_of_step"] == 3
    (row,) = (row for row in read_metrics(stopped[0]) if row["step"] == 4 and "loss" in row)
    assert about["step_metrics"] == {name: row[name] for name in ("loss", "gradient_norm")}
    ranks = [pair["loss_rank"] for pair in about["pairs"] if "gradient_norm" in pair]
    assert sorted(ranks) == [1, 2]


def test_what_is_damaged_explains_nothing(stopped: tuple[Path, str], tmp_path: Path) -> None:
    run, _ = stopped
    array = next((run / "checkpoints" / "2" / "params").rglob("ocdbt.process_0/d/*"))
    for path, step, said in (
        (array, 3, "checkpoints/2: damaged (params/"),
        (run / "checkpoints" / "4" / "note" / "metadata", 3, "checkpoints/4: damaged (note/"),
        (run / "data" / "train.english.tokens.npy", 1, "data: damaged: train.english.tokens.npy"),
    ):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert said in m4("explain", run, f"--step={step}").mistake
        path.write_bytes(content)


def test_what_is_no_step_is_one_line(stopped: tuple[Path, str]) -> None:
    assert "--step=13: must be from 1 to 12" in m4("explain", stopped[0], "--step=13").mistake
