"""The documented example of two processes (docs/parallelism.md) runs as it is written."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from m4 import config
from m4.cli.arguments import split_arguments
from m4.jobs import prepare
from m4.parallel.mesh import make_mesh
from m4.storage.checkpoints import latest_step
from m4.storage.metrics_log import read_metrics

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "gin_configs" / "demo.gin"
(EXAMPLE,) = re.findall(
    r"^```\n(export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2.*?)^```$",
    (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)


def test_its_sizes_divide_over_its_devices() -> None:
    command = re.search(r"m4 train (.*?) &", EXAMPLE, re.DOTALL)
    assert command is not None
    _, bindings = split_arguments(shlex.split(command[1]))
    experiment = config.load([DEMO], bindings).experiment()
    mesh = functools.partial(make_mesh, devices=jax.devices()[:4])
    training = dataclasses.replace(experiment.training, mesh=mesh)
    assert prepare.check_sizes(dataclasses.replace(experiment, training=training)).size == 4


@pytest.mark.slow
@pytest.mark.thorough
def test_it_trains(tmp_path: Path) -> None:
    """Shortened: two steps on one small language, with the demo's own sizes."""
    text = DEMO.read_text(encoding="utf-8")
    text = re.sub(r"^TRAIN_STEPS = \d+", "TRAIN_STEPS = 2", text, flags=re.MULTILINE)
    text = re.sub(r"Cldr.sizes = \{.*?\}", "Cldr.sizes = {'gl': 90}", text, flags=re.DOTALL)
    (tmp_path / "gin_configs").mkdir()
    (tmp_path / "gin_configs" / "demo.gin").write_text(text, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert EXAMPLE.count(":8476") == 1
    said = subprocess.run(
        ["bash", "-c", EXAMPLE.replace(":8476", f":{port}")],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert latest_step(tmp_path / "runs" / "two" / "checkpoints") == 2, said.stderr
    assert read_metrics(tmp_path / "runs" / "two")[-1]["step"] == 2
