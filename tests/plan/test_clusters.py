"""Clusters of GPUs: their sizes, the time of exchanges, and a program compiled for one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from m4.plan import launch
from m4.plan.hlo import Collective
from m4.plan.machines import GIB, GPUS, Cluster, topology
from m4.plan.step_time import seconds_of, step_time
from tests.command_line import m4

ROOT = Path(__file__).parents[2]


def collective(kind: str, operand: int, groups: tuple[tuple[int, ...], ...]) -> Collective:
    return Collective(kind, "x", operand, operand, groups)


def test_nodes_and_gpus() -> None:
    machine = topology("h100:16x8")
    assert isinstance(machine, Cluster)
    assert (machine.devices, machine.chips, machine.name) == (128, 128, "h100:16x8")
    assert machine.chip.device_bytes == int(79.1 * GIB)
    # TF32 is half of bfloat16 on tensor cores.
    assert machine.chip.device_flops("bfloat16") / machine.chip.device_flops("float32") == (
        pytest.approx(2, rel=0.01)
    )


@pytest.mark.parametrize("name", ["h100:16", "h100:16x9", "h100:0x8", "h100:2x2x2", "a100:2x8"])
def test_unknown_cluster_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^--topology=") as error:
        topology(name)
    assert "\n" not in str(error.value)


def test_time_of_collectives_is_that_of_their_slowest_links() -> None:
    machine = topology("h100:2x4")  # devices 0 to 3 and 4 to 7
    gpu = GPUS["h100"]
    whole, node, across = (tuple(range(8)),), ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5))
    size = 8_000_000

    def seconds(kind: str, groups: tuple[tuple[int, ...], ...]) -> float:
        return seconds_of(collective(kind, size, groups), machine)

    # Half of what each of 8 has is for the other node, over its own adapter.
    assert seconds("all-to-all", whole) == pytest.approx(size / 2 / gpu.network_bytes)
    assert seconds("all-to-all", node) == pytest.approx(size * 3 / 4 / gpu.nvlink_bytes)
    # A ring of 8 sends 2 * 7/8 of it: over the 4 adapters of a node together.
    assert seconds("all-reduce", whole) == pytest.approx(2 * size * 7 / 8 / 4 / gpu.network_bytes)
    assert seconds("all-reduce", node) == pytest.approx(2 * size * 3 / 4 / gpu.nvlink_bytes)
    # A ring of 2 sends all of it once there and once back: one GPU of each node.
    assert seconds("all-reduce", across) == pytest.approx(size / gpu.network_bytes)
    assert seconds("collective-permute", ((0, 1), (1, 2))) == size / gpu.nvlink_bytes
    assert seconds("collective-permute", ((0, 1), (3, 4))) == size / gpu.network_bytes


def test_step_time_is_flops_at_the_peak_plus_collectives() -> None:
    machine = topology("h100:1x8")
    found = [collective("all-to-all", 450_000_000, (tuple(range(8)),))]
    # 989e12 operations: one second in bfloat16. 7/8 of 0.45 GB at 450 GB/s: 0.875 ms.
    time = step_time(0, 989e12, "bfloat16", found, machine)
    assert time.compute == pytest.approx(1.0)
    assert time.total == pytest.approx(1.000875)


def test_missing_gpu_compiler_error_names_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "CUDA_COMPILER", tmp_path / "nothing")
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^the compiler for GPUs is not installed: `make pod-gpu`"
    ):
        launch.check_compiler("cuda")


@pytest.mark.slow
@pytest.mark.skipif(not launch.CUDA_COMPILER.is_dir(), reason="needs `make pod-gpu`")
@pytest.mark.thorough
def test_step_compiled_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name, raising=False)
    config = ROOT / "gin_configs" / "moe_128e_12l.gin"
    small = [
        "--gin.transformer.Transformer.encoder_layers=2",
        "--gin.transformer.Transformer.decoder_layers=2",
        "--gin.moe.MoeLayer.num_experts=16",
        "--gin.BATCH_SIZE=256",
        "--gin.DROPOUT_RATE=0.0",
    ]
    said = m4(
        *("plan", f"--gin_file={config}", "--topology=h100:2x8", "--price_per_chip_hour=2"),
        *(f"--output={tmp_path}", *small),
    )
    assert said.status == 0, said.err
    assert said.err == ""
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
from m4.plan.machines import topology
from m4.plan.program import train_program

experiment = config.load([sys.argv[1]], model_dir="unused").experiment()
program = train_program(experiment, devices_of(topology("h100:1x1")), 2)
print(json.dumps(re.findall(r"= f32\\S* scatter\\(.*", program.lowered.compile().as_text())))
"""


@pytest.mark.slow
@pytest.mark.skipif(not launch.CUDA_COMPILER.is_dir(), reason="needs `make pod-gpu`")
@pytest.mark.thorough
def test_a_step_for_a_gpu_adds_up_in_a_fixed_order_where_that_is_asked_for() -> None:
    # docs/gpu.md, "The same numbers again": rows of one index would be added in any order.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUMPY_RANK_PROMOTION"}
    environment |= {**launch.ENVIRONMENT, "PYTHONPATH": str(launch.CUDA_COMPILER)}
    environment["XLA_FLAGS"] = "--xla_gpu_exclude_nondeterministic_ops=true"
    done = subprocess.run(
        [sys.executable, "-c", SCATTERS, str(ROOT / "tests" / "testdata" / "tiny.gin")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    scatters = json.loads(done.stdout.splitlines()[-1])
    assert len(scatters) > 2
    assert [line for line in scatters if "unique_indices=true" not in line] == []
