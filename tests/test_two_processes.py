"""The sizes of the documented example of two processes (docs/parallelism.md) fit its devices."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from pathlib import Path

import jax

from m4 import config
from m4.build import build
from m4.cli.arguments import split_arguments
from m4.parallel.mesh import make_mesh

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "gin_configs" / "demo.gin"
(EXAMPLE,) = re.findall(
    r"^```\n(export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2.*?)^```$",
    (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)


def test_sizes_of_the_example_divide_over_its_devices() -> None:
    command = re.search(r"m4 train (.*?) &", EXAMPLE, re.DOTALL)
    assert command is not None
    _, bindings = split_arguments(shlex.split(command[1]))
    experiment = config.load([DEMO], bindings).experiment()
    mesh = functools.partial(make_mesh, devices=jax.devices()[:4])
    training = dataclasses.replace(experiment.training, mesh=mesh)
    parts = build(dataclasses.replace(experiment, training=training), None)
    parts.check_training()
    assert parts.mesh.size == 4
