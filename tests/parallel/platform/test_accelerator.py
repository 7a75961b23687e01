"""An accelerator that was asked for is used, or one line says why not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from m4.parallel.platform import accelerator
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError

TINY = Path(__file__).parents[2] / "testdata" / "tiny.gin"
# What the plug-in for CUDA does on a machine without NVIDIA's driver.
WITHOUT_DRIVER = """\
def initialize():
    raise RuntimeError("versions_helpers.cc:135: operation cuInit(0) failed")
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    before = jax.config.values["jax_platforms"]
    accelerator.check_accelerator.cache_clear()
    yield
    accelerator.check_accelerator.cache_clear()
    jax.config.update("jax_platforms", before)


def with_plugin(folder: Path) -> str:
    """A path on which JAX finds a plug-in for CUDA."""
    plugin = folder / "jax_plugins" / "xla_cuda12"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(WITHOUT_DRIVER)
    return str(folder)


def without_driver(
    folder: Path, asked: str | None, *command: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": with_plugin(folder)}
    environment.pop("JAX_PLATFORMS", None)
    if asked is not None:
        environment["JAX_PLATFORMS"] = asked
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )


def test_a_missing_driver_is_one_line_before_anything_is_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = ["-m", "m4", "train", f"--gin_file={TINY}", f"--model_dir={run}"]
    done = without_driver(tmp_path, None, *train)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("m4 train: JAX can use no GPU; does `nvidia-smi` list one?")
    assert "operation cuInit(0) failed" in line
    assert not run.exists()


def test_a_machine_without_tpus_is_one_line(tmp_path: Path) -> None:
    # Nor a cluster that JAX would ask for the job's processes.
    known = ("JAX_", "TPU_", "SLURM_", "OMPI_", "MEGASCALE_", "KUBERNETES_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(known)}
    done = subprocess.run(
        [sys.executable, "-m", "m4", "train", f"--gin_file={TINY}", f"--model_dir={tmp_path}"],
        env={**environment, "JAX_PLATFORMS": "tpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("m4 train: JAX_PLATFORMS=tpu, but JAX finds no TPU slice here")
    assert "docs/cloud_tpu.md" in line


@pytest.mark.parametrize(
    ("asked", "plugin", "start", "message"),
    [
        ("cuda", None, ("cpu", ""), "JAX_PLATFORMS=cuda, but .* `make setup CUDA=1`"),
        ("gpu,cpu", None, ("cpu", ""), "JAX_PLATFORMS=gpu, but .* `make setup CUDA=1`"),
        ("cuda", "xla_cuda12", (None, ""), "JAX can use no GPU; .* runs on the CPU$"),
        ("tpu", None, (None, "no libtpu.so"), "^JAX_PLATFORMS=tpu: no libtpu.so; `make pod` "),
        ("", None, ("cpu", ""), None),
        ("", None, ("tpu", ""), None),
        ("", "xla_cuda12", ("gpu", ""), None),
        ("cuda", "xla_cuda12", ("gpu", ""), None),
    ],
)
def test_what_was_asked_for_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys, asked: str, plugin, start, message: str | None
) -> None:
    monkeypatch.setattr(accelerator, "gpu_plugin", lambda: plugin)
    monkeypatch.setattr(accelerator, "_start", lambda: start)
    jax.config.update("jax_platforms", asked)
    if message is None:
        accelerator.check_accelerator()
        assert capsys.readouterr() == ("", "")
    else:
        with pytest.raises(InputError, match=message):
            accelerator.check_accelerator()


@pytest.mark.parametrize(
    ("asked", "plugin", "then"),
    [(None, None, "cpu"), (None, "xla_cuda12", "cuda,cpu"), ("tpu,cpu", None, "tpu,cpu")],
)
def test_a_compiler_for_tpus_alone_is_not_asked_for_devices(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, plugin: str | None, then: str
) -> None:
    monkeypatch.setattr(accelerator, "gpu_plugin", lambda: plugin)
    monkeypatch.setattr(accelerator.importlib.util, "find_spec", lambda name: name == "libtpu")
    jax.config.update("jax_platforms", asked)
    accelerator.skip_libtpu()
    assert jax.config.values["jax_platforms"] == then


def test_a_gpu_left_unused_is_reported_once(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(accelerator, "gpu_plugin", lambda: "xla_cuda12")
    accelerator.check_accelerator()
    accelerator.check_accelerator()
    line = "on the CPU: JAX_PLATFORMS=cpu leaves the GPU's plug-in (xla_cuda12) unused\n"
    assert capsys.readouterr() == ("", line)


def test_the_plug_in_is_found_without_jax(tmp_path: Path) -> None:
    program = (
        "import sys; from m4.parallel.platform import hardware\n"
        "print(hardware.gpu_plugin(), hardware.gpu_expected(), 'jax' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": with_plugin(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "xla_cuda12 True False\n"


@pytest.mark.parametrize(("system", "cpus"), [("linux", [2, 5]), ("darwin", [0, 1, 2])])
def test_available_cpus(monkeypatch: pytest.MonkeyPatch, system: str, cpus: list[int]) -> None:
    """Only Linux reports the affinity of the process, 0; elsewhere all CPUs count."""
    monkeypatch.setattr(sys, "platform", system)
    mine = {0: {5, 2}}
    monkeypatch.setattr(os, "sched_getaffinity", mine.__getitem__, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert available_cpus() == cpus
