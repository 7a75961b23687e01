"""Programs compiled ahead of time, for TPUs by libtpu (`make pod`), for GPUs (`make pod-gpu`)."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from m4.parallel.platform.machines import GIB
from m4.plan import launch
from tests.command_line import TINY, Said, m4

CONFIGS = Path(__file__).parents[2] / "gin_configs"

pytestmark = [pytest.mark.thorough, pytest.mark.slow]
tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ,
    reason="needs libtpu: make pod",
)
gpu = pytest.mark.skipif(not launch.CUDA_COMPILER.is_dir(), reason="needs `make pod-gpu`")


@pytest.fixture(autouse=True)
def _the_programs_as_they_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the settings that make tests compile quickly for CPUs."""
    for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name, raising=False)


def plan(config: str, folder: Path, *arguments: str) -> Said:
    return m4("plan", f"--gin_file={CONFIGS / config}.gin", f"--output={folder}", *arguments)


def facts_of(config: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Returns the facts of a plan that fits; nothing is said of the compiler's log."""
    said = plan(config, folder, *arguments)
    assert said.status == 0, said.err
    assert said.err == ""
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text("utf-8"))


# T(96L)'s widths with replicated weights, one layer a stack and no loops: the compiler refuses it
# within seconds; with 96 layers it would first try to save memory.
SHALLOW = (
    "--topology=v3:2x2",
    "--gin.mesh.make_mesh.fsdp=1",
    *(f"--gin.transformer.Transformer.{stack}_layers=1" for stack in ("encoder", "decoder")),
    "--gin.transformer.Transformer.scan_layers=False",
)


@tpu
def test_batch_that_does_not_fit_is_refused_with_advice(tmp_path: Path) -> None:
    # 8,192 rows a core. The hidden layer of 128 pieces each in one feed-forward layer is
    # 8192 * 128 * 8192 float32 = 32 GiB already.
    rows = ("--gin.BATCH_SIZE=65536", "--gin.transformer.Transformer.remat='none'")
    said = plan("t_96l", tmp_path, *SHALLOW, *rows, "--gin.DROPOUT_RATE=0.0")
    assert said.status == 3, said.err
    assert said.err == ""  # no log of the compiler
    facts = json.loads((tmp_path / "t_96l.v3-2x2.json").read_text("utf-8"))
    message = facts["refused"]["message"]  # printed in lines of the terminal's width
    assert f"does not fit: {message}" in " ".join(said.out.split())
    assert message.startswith("Ran out of memory")
    needed, available = re.findall(r"([\d.]+)G", message)[:2]
    assert float(needed) > 32
    assert float(available) == pytest.approx(15.48, abs=0.1)
    # Refused early, in 1 to 3 s of CPU time, which hardly depends on what else runs.
    assert facts["compiler"]["compile_cpu_seconds"] < 7
    for name in ("fsdp_axes", "remat = 'full'", "BATCH_SIZE", "dtype = 'bfloat16'"):
        assert any(name in line for line in facts["refused"]["advice"]), name
        assert name in " ".join(said.out.split()), name


@tpu
def test_program_for_v5p(tmp_path: Path) -> None:
    # Three dimensions, two cores that are one device, a printer that has failed. One layer a stack.
    layers = ("encoder_layers=1", "decoder_layers=1", "moe_every=1")
    given = (f"--gin.transformer.Transformer.{layer}" for layer in layers)
    facts = facts_of("strategies/expert_parallel", tmp_path, "--topology=v5p:2x2x2", *given)
    flops = facts["flops"]["step"]
    assert facts["devices"] == 8
    assert facts["device_bytes"] == 95 * GIB
    # Two layers exchange there and back, forward and backward.
    assert facts["collectives"]["all-to-all"]["count"] == 2 * 2 * 2
    # At least as long as its operations take at the peak.
    assert facts["seconds"]["step"]["compute"] > flops["model"] / 459e12


@tpu
def test_experts_exchange_inside_a_slice_and_gradients_cross(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The config of one slice, on two: a copy of the model each, eight experts over four chips.
    monkeypatch.setenv("JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "-1.0")
    layers = ("encoder_layers=1", "decoder_layers=1", "moe_every=1", "scan_layers=False")
    given = (f"--gin.transformer.Transformer.{layer}" for layer in layers)
    facts = facts_of("v5e_8", tmp_path, "--topology=2*v5e:2x2", *given)
    assert facts["devices"] == 8
    # Two layers exchange there and back, forward and backward.
    assert facts["collectives"]["all-to-all"]["count"] == 2 * 2 * 2
    assert "all-to-all between slices" not in facts["collectives"]
    # What crosses is gradients: of a chip's experts, in bfloat16 as the exchange, and of all other
    # weights a chip's share. (A few numbers are permuted.)
    experts, others = (facts["given_bytes"][f"{kind} weights"] for kind in ("expert", "replicated"))
    summed = facts["collectives"]["all-reduce between slices"]["sent_bytes"]
    assert summed == pytest.approx(experts / 2 + others / 4, rel=0.05)
    assert summed == pytest.approx(facts["sent_bytes"]["dcn"], rel=1e-5)
    assert facts["sent_bytes"]["ici"] > 0
    assert facts["seconds"]["step"]["communication"]["all-reduce between slices"] == pytest.approx(
        summed / 3.125e9
    )


@tpu
@pytest.mark.every_part
def test_the_papers_smallest_model_on_its_128_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiler's least effort for a quick program: half of the time, the same collectives and
    # products. `make plan-paper` compiles it as it would run.
    monkeypatch.setenv("JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "-1.0")
    # A fourth of its batch, the tokens a core of the larger models.
    facts = facts_of("moe_128e_12l", tmp_path, "--topology=v3:8x8", "--gin.BATCH_SIZE=2048")
    flops = facts["flops"]["step"]
    assert facts["devices"] == 128
    # 90 s of two cores for all of it, waiting left out.
    assert facts["compiler"]["cpu_seconds"] < 180
    # An expert a core in six layers: 6 * 2 * 1024 * 8192 float32.
    assert facts["memory_bytes"]["expert weights"] == 6 * 2 * 1024 * 8192 * 4
    assert sum(facts["memory_bytes"].values()) < facts["device_bytes"] == 16 * GIB
    # A layer exchanges there and back, forward, again (remat) and backward: 6 * 6 times. Each
    # sends two copies of 2,048 tokens of 1,024 float32. (With more effort they are sent in
    # bfloat16, to which a TPU's products round.)
    exchange = facts["collectives"]["all-to-all"]
    assert exchange["count"] == 36
    assert exchange["payload_bytes"] == 36 * 2 * 2048 * 1024 * 4
    # Nothing is gathered: what Shardy does where an annotation is missing.
    assert set(facts["collectives"]) <= {"all-to-all", "all-reduce"}
    # The gradients of all weights that are everywhere are summed, once.
    replicated = facts["given_bytes"]["replicated weights"]
    assert facts["collectives"]["all-reduce"]["payload_bytes"] == pytest.approx(replicated, rel=0.1)
    assert facts["unknown_loops"] == 0
    assert flops["traced"] == pytest.approx(flops["executed"], rel=1e-3)
    # At least as long as its operations take at the peak.
    assert facts["seconds"]["step"]["compute"] > flops["executed"] / (123e12 / 2)


@tpu
def test_search_over_experts_apart_multiplies_the_rows_that_there_are(tmp_path: Path) -> None:
    facts = facts_of("v4_128", tmp_path, "--topology=v4:4x4x4", "--program=decode")
    for part in ("encoding", "step"):
        flops = facts["flops"][part]
        assert flops["kernels"] > 0
        assert flops["executed"] <= 2 * flops["model"]
    # The rounds of the encoder's rows are no loop of the search.
    assert facts["unknown_loops"] == 1
    # Rows there and back in a layer with experts, three a stack.
    assert facts["collectives"]["ragged-all-to-all"]["count"] == 2 * 3 * 2


@tpu
@pytest.mark.parametrize("machine", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4", "h100:1x8"])
def test_rows_travel_where_training_drops_nothing(tmp_path: Path, machine: str) -> None:
    if machine.startswith("h100") and not launch.CUDA_COMPILER.is_dir():
        pytest.skip("needs the compiler for GPUs: make pod-gpu")
    every = "--gin.moe.MoeLayer.train_capacity_factor=None"
    facts = facts_of("strategies/expert_parallel", tmp_path, f"--topology={machine}", every)
    # Two layers with experts: there and back; in the backward pass there again, and both ways back.
    assert facts["collectives"]["ragged-all-to-all"]["count"] >= 2 * (2 + 3)
    assert (facts["flops"]["step"]["kernels"] > 0) == (not machine.startswith("h100"))


@gpu
def test_step_compiled_for_gpus(tmp_path: Path) -> None:
    sizes = ("transformer.Transformer.encoder_layers=2", "transformer.Transformer.decoder_layers=2",
             "moe.MoeLayer.num_experts=16", "BATCH_SIZE=256", "DROPOUT_RATE=0.0")  # fmt: skip
    small = [f"--gin.{size}" for size in sizes]
    asked = ("--topology=h100:2x8", "--price_per_chip_hour=2", *small)
    said = plan("moe_128e_12l", tmp_path, *asked)
    assert (said.status, said.err) == (0, "")
    facts = json.loads((tmp_path / "moe_128e_12l.h100-2x8.json").read_text("utf-8"))
    flops = facts["flops"]["step"]
    # An expert a GPU in two layers: 2 * 2 * 1024 * 8192 float32.
    assert facts["memory_bytes"]["expert weights"] == 2 * 2 * 1024 * 8192 * 4
    # Two layers, there and back, forward, again (remat) and backward.
    assert facts["collectives"]["all-to-all"]["count"] == 12
    assert facts["seconds"]["step"]["compute"] == pytest.approx(flops["traced"] / 495e12)
    assert "price, at 2 a GPU and hour" in said.out


SCATTERS = """
import json, re, sys
from m4 import config
from m4.plan.compile import devices_of
from m4.parallel.platform.machines import topology
from m4.plan.program import train_program

experiment = config.load([sys.argv[1]], model_dir="unused").experiment()
program = train_program(experiment, devices_of(topology("h100:1x1")), 2)
print(json.dumps(re.findall(r"= f32\\S* scatter\\(.*", program.lowered.compile().as_text())))
"""


@gpu
def test_a_step_for_a_gpu_adds_up_in_a_fixed_order_where_that_is_asked_for() -> None:
    # docs/gpu.md, "The same numbers again": rows of one index would be added in any order.
    environment = {**os.environ, **launch.ENVIRONMENT, "PYTHONPATH": str(launch.CUDA_COMPILER)}
    environment["XLA_FLAGS"] = "--xla_gpu_exclude_nondeterministic_ops=true"
    done = subprocess.run(
        [sys.executable, "-c", SCATTERS, str(TINY)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    scatters = json.loads(done.stdout.splitlines()[-1])
    assert len(scatters) > 2
    assert [line for line in scatters if "unique_indices=true" not in line] == []
