"""The folder of compiled programs; an accelerator that was asked for is used, or refused."""

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import zstandard
from jax._src import compilation_cache as programs
from jax.experimental.compilation_cache import compilation_cache

from m4.jobs.open_run import _programs
from m4.parallel.platform import jax_setup
from m4.parallel.platform.jax_setup import check_accelerator, set_up
from m4.settings import InputError
from m4.storage.run_folder import KINDS
from tests.command_line import TINY

NAMES = (
    "jax_platforms", "jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches",
    "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes",
)  # fmt: skip
HOME = "home/m4/compilation_cache"


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = {name: jax.config.values[name] for name in NAMES}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    jax.config.update("jax_compilation_cache_dir", None)
    check_accelerator.cache_clear()
    yield
    check_accelerator.cache_clear()
    for name, value in before.items():
        jax.config.update(name, value)


def cache_used(folder: Path | None) -> Path:
    set_up(folder)
    return Path(jax.config.values["jax_compilation_cache_dir"])


def test_compilation_cache_is_private(tmp_path: Path) -> None:
    before = os.umask(0o002)  # folders are made writable for the group
    try:
        assert cache_used(tmp_path / "run" / "cache") == tmp_path / "run" / "cache"
    finally:
        os.umask(before)
    assert (tmp_path / "run" / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "another"), [(0o770, False), (0o707, False), (0o700, True)])
def test_cache_that_others_made_or_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, another: bool
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    if another:
        monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "cache").stat().st_uid + 1)
    assert cache_used(tmp_path / "cache") == tmp_path / HOME


def test_cache_that_is_set_stays(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert cache_used(tmp_path / "cache") == tmp_path / "mine"


@pytest.mark.parametrize(
    ("address", "kinds", "place"),
    [
        # A run folder may be anybody's: no job runs a program that is in it.
        *(("run", kinds, HOME) for kinds in ((), *((kind,) for kind in KINDS))),
        ("gs://bucket/run", ("train",), "copy/compilation_cache/train"),
        ("gs://bucket/run", (), HOME),  # a job that only reads there
    ],
)
def test_programs_of_a_run_are_kept_in_a_bucket_or_at_home(
    tmp_path: Path, address: str, kinds: tuple[str, ...], place: str
) -> None:
    assert cache_used(_programs(tmp_path / "copy", address, kinds)) == tmp_path / place


def test_key_of_a_program_does_not_hold_the_folder(tmp_path: Path) -> None:
    """A folder that was copied, or is another machine's, has the programs that are needed."""
    names = []
    for number in range(2):
        jax.config.update("jax_compilation_cache_dir", None)
        folder = cache_used(tmp_path / str(number) / "cache")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        jax.clear_caches()
        try:
            jax.jit(lambda x: 3 * x + 1)(np.float32(2)).block_until_ready()
        finally:
            compilation_cache.reset_cache()
        names.append({path.name for path in folder.iterdir() if path.name.endswith("-cache")})
    assert names[0] == names[1] != set()


def test_a_flipped_bit_in_a_kept_program_is_an_error(tmp_path: Path) -> None:
    set_up(tmp_path)
    program, draw = bytes(range(256)) * 64 + os.urandom(1000), random.Random(1)
    kept = programs.compress_executable(program)
    assert programs.decompress_executable(kept) == program
    used = 0
    for bit in draw.sample(range(8 * len(kept)), 300):
        damaged = bytearray(kept)
        damaged[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(zstandard.ZstdError):
            assert programs.decompress_executable(bytes(damaged)) == program
            used += 1
    assert used < 10  # bits of the header that are of no consequence


def test_the_newest_programs_are_kept_up_to_a_size(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "older", "oldest")):
        (tmp_path / f"{name}-cache").write_bytes(bytes(100))
        os.utime(tmp_path / f"{name}-cache", (10**9 - age, 10**9 - age))
    (tmp_path / "mine.txt").write_bytes(bytes(100))
    jax_setup._trim(tmp_path, 200)
    assert {path.name for path in tmp_path.iterdir()} == {"new-cache", "older-cache", "mine.txt"}


# What the plug-in for CUDA does on a machine without NVIDIA's driver.
WITHOUT_DRIVER = """\
def initialize():
    raise RuntimeError("versions_helpers.cc:135: operation cuInit(0) failed")
"""


def run_m4(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = ["train", f"--gin_file={TINY}", f"--model_dir={folder}"]
    return subprocess.run(
        [sys.executable, "-m", "m4", *words], env=environment, capture_output=True, text=True
    )


def test_a_missing_driver_is_one_line_before_anything_is_made(tmp_path: Path) -> None:
    plugin = tmp_path / "jax_plugins" / "xla_cuda12"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(WITHOUT_DRIVER)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("JAX_PLATFORMS", None)
    done = run_m4(tmp_path / "run", environment)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("m4 train: JAX can use no GPU; does `nvidia-smi` list one?")
    assert "operation cuInit(0) failed" in line
    assert not (tmp_path / "run").exists()


def test_a_machine_without_tpus_is_one_line(tmp_path: Path) -> None:
    # Nor a cluster that JAX would ask for the job's processes.
    known = ("JAX_", "TPU_", "SLURM_", "OMPI_", "MEGASCALE_", "KUBERNETES_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(known)}
    done = run_m4(tmp_path, {**environment, "JAX_PLATFORMS": "tpu"})
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
    monkeypatch.setattr(jax_setup, "gpu_plugin", lambda: plugin)
    monkeypatch.setattr(jax_setup, "_start", lambda: start)
    jax.config.update("jax_platforms", asked)
    if message is None:
        check_accelerator()
        assert capsys.readouterr() == ("", "")
    else:
        with pytest.raises(InputError, match=message):
            check_accelerator()


@pytest.mark.parametrize(
    ("asked", "plugin", "then"),
    [(None, None, "cpu"), (None, "xla_cuda12", "cuda,cpu"), ("tpu,cpu", None, "tpu,cpu")],
)
def test_a_compiler_for_tpus_alone_is_not_asked_for_devices(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, plugin: str | None, then: str
) -> None:
    monkeypatch.setattr(jax_setup, "gpu_plugin", lambda: plugin)
    monkeypatch.setattr(jax_setup.importlib.util, "find_spec", lambda name: name == "libtpu")
    jax.config.update("jax_platforms", asked)
    jax_setup.skip_libtpu()
    assert jax.config.values["jax_platforms"] == then


def test_a_gpu_left_unused_is_reported_once(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(jax_setup, "gpu_plugin", lambda: "xla_cuda12")
    check_accelerator()
    check_accelerator()
    line = "on the CPU: JAX_PLATFORMS=cpu leaves the GPU's plug-in (xla_cuda12) unused\n"
    assert capsys.readouterr() == ("", line)
