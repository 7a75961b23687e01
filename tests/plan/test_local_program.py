"""`m4 collectives` of a config: what a training step sends and holds on 8 fake devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import m4

STRATEGIES = Path(__file__).parents[2] / "gin_configs" / "strategies"
SMALL = [
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    "--gin.corpus.CorpusSpec.vocabulary_size=256",
    "--gin.transformer.Transformer.encoder_layers=1",
    "--gin.transformer.Transformer.decoder_layers=1",
    "--gin.transformer.Transformer.moe_every=1",
    "--gin.transformer.Transformer.width=32",
    "--gin.transformer.Transformer.mlp_width=64",
    "--gin.moe.MoeLayer.group_tokens=8",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("measured")
    found = {}
    for name in ("data_parallel", "zero"):
        output = folder / f"{name}.json"
        said = m4(
            "collectives", f"--gin_file={STRATEGIES / name}.gin", f"--output={output}", *SMALL
        )
        assert said.status == 0, said.err
        found[name] = {**json.loads(output.read_text(encoding="utf-8")), "said": said.out}
    return found


@pytest.mark.thorough
def test_sharded_weights_are_gathered_and_take_an_eighth(measured: dict[str, Any]) -> None:
    whole, parts = measured["data_parallel"], measured["zero"]
    # Nothing else than sums of gradients is sent; they are as large as the weights, and more: what
    # the loss and its metrics sum.
    assert set(whole["collectives"]) == {"all-reduce"}
    weights = ("replicated weights", "expert weights")
    sizes = {name: sum(m["memory_bytes"][k] for k in weights) for name, m in measured.items()}
    assert whole["collectives"]["all-reduce"]["operand_bytes"] >= sizes["data_parallel"]
    assert parts["collectives"]["all-gather"]["count"] > 0
    # What does not divide by 8 stays whole: norms and positions, a few hundred numbers.
    assert sizes["data_parallel"] / 8 <= sizes["zero"] <= sizes["data_parallel"] / 8 + 4096
    # AdamW keeps two numbers a weight.
    for name, m in measured.items():
        assert 2 * sizes[name] <= m["memory_bytes"]["optimizer state"] <= 2 * sizes[name] + 64
        assert "all-reduce" in m["said"]


def test_settings_without_a_config_are_refused() -> None:
    for alone in ("--gin_bindings=BATCH_SIZE = 16", "--gin.BATCH_SIZE=16"):
        assert "give a config: --gin_file=" in m4("collectives", alone).mistake


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices=0"], "--devices=0: must be 1 or more"),
        (["--gin.mesh.make_mesh.data=3"], "make_mesh.data = 3"),
        (["--gin.BATCH_SIZE=12"], "BATCH_SIZE): must be divisible by 8"),
    ],
)
def test_mistakes(arguments: list[str], said: str) -> None:
    config = f"--gin_file={STRATEGIES / 'data_parallel'}.gin"
    assert said in m4("collectives", config, *SMALL, *arguments).mistake
