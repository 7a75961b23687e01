"""The examples run, and show what they say."""

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from m4.eval.metrics import Statistics, counted
from m4.parallel.sharding import replicate, split
from m4.plan.hlo import summary
from m4.settings import SettingError
from m4.storage.files import read_jsonl
from tests.command_line import TINY, Said, m4

FOLDER = Path(__file__).parents[1] / "examples"


def example(name: str, folder: Path = FOLDER) -> ModuleType:
    """Returns the example of this name as a module."""
    spec = importlib.util.spec_from_file_location(f"examples.{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_split_by_annotated_arguments_equals_one_device() -> None:
    spatial = example("spatial_partitioning")
    images = jax.random.normal(jax.random.key(0), (1, 16, 4, 4, 2))
    kernels = spatial.make_kernels(channels=2)
    expected = spatial.network(images, kernels)
    result, sent = spatial.run(spatial.network, split(images, 1, 8), replicate_all(kernels))
    np.testing.assert_allclose(result, expected, atol=1e-6)
    # It stays split: two of sixteen layers on each device.
    assert result.sharding.shard_shape(result.shape) == (1, 2, 4, 4, 2)
    # Three convolutions with a halo from either side, one of stride 2 with one from the right.
    assert {kind: total.count for kind, total in summary(sent).items()} == {
        "collective-permute": 3 * 2 + 1
    }
    # Neighbours alone: 0 -> 1 ... 6 -> 7, or the other way.
    for each in sent:
        steps = {target - source for source, target in each.groups}
        assert len(each.groups) == 7
        assert steps in ({1}, {-1})
    # One layer of 4 x 4 x 2 float32 (128 bytes) from either side at "in", with twice the channels
    # at "out", from one side at "down", and of 2 x 2 x 2 (32) from either side at "middle".
    assert sorted(each.operand_bytes for each in sent) == [32, 32, 128, 128, 128, 256, 256]


def test_gradients_send_halos_and_are_summed() -> None:
    spatial = example("spatial_partitioning")
    images = jax.random.normal(jax.random.key(0), (1, 16, 4, 4, 2))
    kernels = spatial.make_kernels(channels=2)
    expected = jax.jit(jax.grad(spatial.loss))(kernels, images)
    everywhere = replicate_all(kernels)
    result, sent = spatial.run(jax.grad(spatial.loss), everywhere, split(images, 1, 8))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6),
        result,
        expected,
    )
    totals = summary(sent)
    assert set(totals) == {"all-reduce", "collective-permute"}
    # The gradients of all kernels: 27 places, 2 + 2 + 2 + 4 channels in, 2 out, float32.
    assert totals["all-reduce"].operand_bytes == 27 * (2 + 2 + 2 + 4) * 2 * 4


def replicate_all(kernels: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: replicate(kernel) for name, kernel in kernels.items()}


@pytest.mark.slow  # seqio's import
@pytest.mark.filterwarnings("default")
def test_tasks_of_tfds_are_registered_by_name() -> None:
    tf, seqio = importlib.import_module("tensorflow"), importlib.import_module("seqio")
    wmt = example("wmt_tasks")
    assert [task.name for task in seqio.get_mixture_or_task("wmt16").tasks] == [
        "wmt16_de_en",
        "wmt16_en_ro",
    ]
    given = tf.data.Dataset.from_tensors({"de": "Guten Tag", "en": "Good day"})
    (pair,) = wmt.translate(given, "de", "en").as_numpy_iterator()
    assert pair == {"inputs": b"translate de to en: Guten Tag", "targets": b"Good day"}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes examples/mine.gin over the tiny config, with mine.py next to it."""
    text = (FOLDER / "mine.gin").read_text(encoding="utf-8")
    (tmp_path / "mine.gin").write_text(text.replace("gin_configs/demo.gin", str(TINY)))
    (tmp_path / "mine.py").write_text((FOLDER / "mine.py").read_text(encoding="utf-8"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def job(name: str, mine: Path) -> Said:
    allow = [] if name == "train" else ["--allow_module=mine"]
    given = [f"--gin_file={mine}/mine.gin"] if name == "train" else []
    return m4(name, *given, f"--model_dir={mine}/run", *allow)


@pytest.mark.thorough
def test_parts_of_ones_own_train_and_score(mine: Path) -> None:
    said = job("train", mine).ok()
    assert m4("decode", f"--model_dir={mine}/run", "--allow_module=mine").status == 0
    said = m4("report", f"--model_dir={mine}/run", "--allow_module=mine",
              "--gin.experiment.Experiment.baselines=None")  # fmt: skip
    assert said.status == 0, said.err
    rows = read_jsonl(mine / "run" / "scores.jsonl")
    assert {row["metric"] for row in rows} == {"bleu", "word_f1"}
    assert {row["direction"] for row in rows} == {"en-gl", "gl-en", "en-es", "es-en"}


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("yield Pair(f\"number {number}\", f\"{self.words[pair.removeprefix('en-')]} {number}\")",
         "yield {'en': 'a', 'gl': 'b'}", "pairs() must yield Pair(first, second), two"),
        ("return {direction: root / sum(roots.values()) for direction, root in roots.items()}",
         "return [*roots.values()]", "must be a function that returns rates by direction, such as"),
        ("logits_GSE = tokens.score(\"router\")", "return tokens.score(\"router\")",
         "must be a function that returns m4.model.routing.Routing, such as plan_choices does"),
    ],
)  # fmt: skip
def test_what_they_return_is_checked(mine: Path, right: str, wrong: str, said: str) -> None:
    text = (mine / "mine.py").read_text(encoding="utf-8")
    assert right in text
    (mine / "mine.py").write_text(text.replace(right, wrong), encoding="utf-8")
    found = job("train", mine)
    assert found.status == 2
    assert said in found.err.splitlines()[-1]


_COMET = """
class Model:
    def predict(self, data, batch_size, progress_bar):
        print("a library that prints")
        self.scores = [len(row["mt"]) / len(row["ref"]) for row in data]
        return self

def download_model(name):
    print("downloads", name)

def load_from_checkpoint(path):
    return Model()
"""


def test_the_scorer_of_comet_prints_numbers_alone(tmp_path: Path) -> None:
    (tmp_path / "comet.py").write_text(_COMET, encoding="utf-8")
    rows = [{"source": "a", "hypothesis": "b" * k, "reference": "bb"} for k in range(1, 301)]
    said = subprocess.run(
        [sys.executable, FOLDER / "comet_scorer.py", "a model"], check=True, capture_output=True,
        input="".join(json.dumps(row) + "\n" for row in rows), text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert [float(line) for line in said.stdout.splitlines()] == [k / 2 for k in range(1, 301)]
    assert "downloads" not in said.stdout


@pytest.mark.parametrize(
    "returns", [42.0, Statistics("f1", np.zeros((1, 2)), lambda sums: sums[..., 0], "f1")]
)
def test_a_metric_returns_statistics_of_each_sentence(returns: object) -> None:
    def f1(*_: object, **__: object) -> Any:
        return returns

    with pytest.raises(SettingError, match=r"Decoding.metrics = .*Statistics\(name of letters"):
        counted(f1, ["a", "b"], ["a", "c"], "gl", ["", ""])


# -------- table 4 of GShard: the collective that each partitioned operator needs, and its growth


table4 = example("table4")

# (operator, what is split) -> collectives of the compiled program, at any number of devices, and
# their bytes on one of D devices. float32; what does not grow is 64 long, of what grows each device
# has 64.
KINDS = {
    ("Add(A,A->A)", "A"): ({}, lambda D: 0),
    # Partial sums of AC = 64 x 64 are added up.
    ("Matmul(AB,BC->AC)", "B"): ({"all-reduce": 1}, lambda D: 64 * 64 * 4),
    ("Matmul(AB,BC->AC)", "A"): ({}, lambda D: 0),
    # Everyone needs the whole of the right side, whose B or C is 64 D.
    ("Matmul(AB,BC->AC)", "A,B"): ({"all-gather": 1}, lambda D: 64 * D * 64 * 4),
    ("Matmul(AB,BC->AC)", "A,C"): ({"all-gather": 1}, lambda D: 64 * D * 64 * 4),
    ("Matmul(BIJ,BJK->BIK)", "B"): ({}, lambda D: 0),
    ("Reduce(AB->A)", "A"): ({}, lambda D: 0),
    ("Reduce(AB->B)", "A"): ({"all-reduce": 1}, lambda D: 64 * 4),
    # One group's tokens: E C = D x 64 / D slots of M = 64.
    ("Einsum(GSEC,GSM->EGCM)", "G,E"): ({"all-to-all": 1}, lambda D: 64 * 64 * 4),
    # A row to either neighbour: of batch 2, 4 channels, 8 columns.
    ("Convolution(BIXY,xyIO->BOXY)", "X"): (
        {"collective-permute": 2},
        lambda D: 2 * (2 * 4 * 1 * 8 * 4),
    ),
}


@functools.cache
def rows() -> tuple[Any, ...]:
    return tuple(table4.table([2, 8]))


def test_kinds_and_bytes() -> None:
    assert {(row.operator.name, row.operator.split) for row in rows()} == set(KINDS)
    for row in rows():
        kinds, payload = KINDS[row.operator.name, row.operator.split]
        for count, cost in row.costs.items():
            assert cost.collectives == kinds, row
            assert cost.payload_bytes == payload(count), row


@pytest.mark.slow
@pytest.mark.thorough
def test_kinds_and_bytes_up_to_64_devices(tmp_path: Path) -> None:
    # A subprocess: JAX has eight devices here, for good.
    path = tmp_path / "table4.json"
    command = [sys.executable, str(FOLDER / "table4.py"), f"--output={path}"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {(row["operator"], row["split"]) for row in found} == set(KINDS)
    for row in found:
        kinds, payload = KINDS[row["operator"], row["split"]]
        assert [*row["costs"]] == ["2", "4", "8", "16", "32", "64"]
        for count, cost in row["costs"].items():
            assert cost["collectives"] == kinds, (row, count)
            assert cost["payload_bytes"] == payload(int(count)), (row, count)
        assert row["agrees"], row


def test_flops_of_one_device() -> None:
    flops = {(row.operator.name, row.operator.split): row.costs[8].flops for row in rows()}
    # A multiplication and an addition for each of A B C, all 64 but for what grows to 8 x 64.
    assert flops["Matmul(AB,BC->AC)", "A"] == 2 * 64**3
    assert flops["Matmul(AB,BC->AC)", "A,B"] == flops["Matmul(AB,BC->AC)", "A,C"] == 8 * 2 * 64**3
    assert flops["Add(A,A->A)", "A"] == 64


def test_growth_is_the_papers() -> None:
    # As printed there: Table 4, "Communication"; the all-to-all's from section 5.3.
    assert [(row.time_growth, row.compute_growth) for row in rows() if row.operator.listed] == [
        ("0", "O(1)"), ("O(1)", "O(1)"), ("0", "O(1)"), ("O(D)", "O(D)"), ("O(D)", "O(D)"),
        ("0", "O(1)"), ("O(1)", "O(1)"), ("O(√D)", "O(1)"), ("O(1)", "O(1)"),
    ]  # fmt: skip
    assert all(row.agrees for row in rows())
