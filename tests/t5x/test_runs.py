"""Stock T5X trains, evaluates and decodes m4's model by gin_configs/t5x alone."""

import json
import math
import re
from pathlib import Path

import pytest

from m4.data.cache.cache import Cache
from tests.t5x.conftest import Run, needs_t5x

needs_t5x()

STEPS = 20
QUIET = ("utils.SaveCheckpointConfig.period=20", "train.eval_period=10")
FEW = ("train.eval_steps=2", "train.stats_period=10")


def train(run: Run, kind: str, folder: Path, *bindings: str, devices: int = 1) -> list[float]:
    """Trains for STEPS steps; returns the training losses per token that T5X logs."""
    said = run(
        "train", f"pretrain_{kind}", f"MODEL_DIR='{folder}'", f"TRAIN_STEPS={STEPS}",
        "utils.create_learning_rate_scheduler.warmup_steps=100", *QUIET, *FEW, *bindings,
        devices=devices,
    )  # fmt: skip
    assert (folder / f"checkpoint_{STEPS}").is_dir()
    assert "split 'validation'" not in said.replace('"', "'"), "training evaluation was skipped"
    losses = re.findall(r"collection=train .*?cross_ent_loss=([\d.]+)", said)
    return [float(loss) for loss in losses]


@pytest.fixture(scope="module")
def trained(run_t5x: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) / "run" for kind in ("dense", "moe")}
    for kind, folder in folders.items():
        check_losses(train(run_t5x, kind, folder))
    return folders


def check_losses(losses: list[float]) -> None:
    assert len(losses) == STEPS // 10
    # Nothing learned is log(512), the rows of the embedding, about 6.2 nats a token.
    assert losses[-1] < losses[0] < 1.5 * math.log(512)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_eval_scores_with_bleu_and_chrf(
    run_t5x: Run, trained: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    run_t5x(
        "eval", f"eval_{kind}", f"CHECKPOINT_PATH='{trained[kind]}/checkpoint_{STEPS}'",
        f"EVAL_OUTPUT_DIR='{tmp_path}'", "MIXTURE_OR_TASK_NAME='m4.to_english'",
    )  # fmt: skip
    for task in ("m4.gl_en", "m4.pt_en"):
        (line,) = (tmp_path / "inference_eval" / f"{task}-metrics.jsonl").read_text().splitlines()
        scores = json.loads(line)
        assert scores["step"] == STEPS
        assert {"bleu", "chrf"} <= {*scores}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_infer_with_four_beams(
    run_t5x: Run, cache: Cache, trained: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    run_t5x(
        "infer", f"infer_{kind}", f"CHECKPOINT_PATH='{trained[kind]}/checkpoint_{STEPS}'",
        f"INFER_OUTPUT_DIR='{tmp_path}'", "MIXTURE_OR_TASK_NAME='m4.en_gl'",
    )  # fmt: skip
    (path,) = tmp_path.glob("m4.en_gl-*.jsonl-00000-of-00001")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    sources = [line["inputs"]["inputs_pretokenized"] for line in lines]
    assert sources == [f"<2gl> {pair.first}" for pair in cache.pairs("en-gl", "test")]
    for line in lines:
        assert len(line["prediction"]) == 4
        scores = line["aux"]["scores"]
        assert scores == sorted(scores), "the best one is last"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_finetuning_continues(
    run_t5x: Run, trained: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """And evaluates by decoding meanwhile."""
    run_t5x(
        "train", f"finetune_{kind}",
        f"INITIAL_CHECKPOINT_PATH='{trained[kind]}/checkpoint_{STEPS}'", f"MODEL_DIR='{tmp_path}'",
        f"TRAIN_STEPS={STEPS + 4}", "MIXTURE_OR_TASK_NAME='m4.gl_en'", "EVAL_PERIOD=4",
        "EVAL_STEPS=1", "utils.SaveCheckpointConfig.period=4",
    )  # fmt: skip
    assert (tmp_path / f"checkpoint_{STEPS + 4}").is_dir()
    (line, *_) = (tmp_path / "inference_eval" / "m4.gl_en-metrics.jsonl").read_text().splitlines()
    assert "bleu" in json.loads(line)


def test_eight_devices_with_expert_and_model_axes(run_t5x: Run, tmp_path: Path) -> None:
    bindings = (
        "NUM_EXPERT_PARTITIONS=4",
        "NUM_MODEL_PARTITIONS=None",
        "MODEL_PARALLEL_SUBMESH=(1,1,1,2)",
    )
    check_losses(train(run_t5x, "moe", tmp_path, *bindings, devices=8))
    info = (tmp_path / "model-info.txt").read_text()
    for name, spec in (
        ("wi", r"\('?expert'?, None, '?model'?\)"),
        ("wo", r"\('?expert'?, '?model'?(, None)?\)"),
    ):
        line = next(row for row in info.splitlines() if f"moe/experts/{name}/kernel" in row)
        assert re.search(spec, line), line


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_scanned_stacks(run_t5x: Run, tmp_path: Path, kind: str) -> None:
    layers = [f"transformer.Transformer.{stack}_layers=4" for stack in ("encoder", "decoder")]
    check_losses(
        train(run_t5x, kind, tmp_path, "transformer.Transformer.scan_layers=True", *layers)
    )


def test_rows_of_one_pair(run_t5x: Run, tmp_path: Path) -> None:
    """Packing is the run files' own; here without."""
    unpacked = [f"{name}/utils.DatasetConfig.pack=False" for name in ("train", "train_eval")]
    check_losses(train(run_t5x, "moe", tmp_path, *unpacked))
