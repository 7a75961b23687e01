"""Compiles in a subprocess with its own environment, one compilation at a time on a machine.

The compilers are packages: libtpu and, for GPUs, JAX's CUDA plugin, which works without CUDA and
without a GPU. Without a GPU, the plugin complains at every start of JAX, so `make pod-gpu` puts it
in a separate folder, which only compiling processes have on their path. libtpu reads its
environment once and takes gigabytes.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from m4.parallel.platform.hardware import package_version
from m4.parallel.platform.machines import topology
from m4.settings import InputError
from m4.storage.locks import local_lock

# Raised with every change of the facts that a compiling process writes (`m4.plan.compile`).
FORMAT = 9
# Keeps libtpu from looking for a device, querying the cloud's metadata or locking a TPU.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    # Programs for absent devices cannot be loaded again.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    # CUDA need not be installed for compiling.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
# Folder in which `make pod-gpu` puts the compiler for GPUs.
CUDA_COMPILER = Path(sys.prefix) / "share" / "m4" / "cuda_compiler"
_CUDA = "jax_cuda12_plugin"
# Without a GPU, the GPU compiler logs these before its log level applies.
_NOISE = ("before absl::InitializeLog() is called", "Could not find cuda drivers")
# Explains the failure of a compiler.
FAULT = (
    "a fault or limit of this version, not a mistake in the config; other sizes (layers, experts, "
    "batch), another dispatch or another version may compile"
)


def check_compiler(platform: str) -> None:
    """Raises InputError if the compiler for "tpu" or "cuda" is not installed."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    if platform == "cuda":
        if not (CUDA_COMPILER / _CUDA).is_dir() and importlib.util.find_spec(_CUDA) is None:
            raise InputError(
                "the compiler for GPUs is not installed: `make pod-gpu` (JAX's CUDA plugin, "
                "182 MB; needs neither a GPU nor CUDA)"
            )
    elif path is not None and not Path(path).is_file():
        raise InputError(f"TPU_LIBRARY_PATH={path}: no such file")
    elif path is None and importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "the TPU compiler is not installed: `make pod` (libtpu, 205 MB; needs no TPU)"
        )


def versions(platform: str = "tpu") -> dict[str, str]:
    """Returns the versions of the packages that decide a result; "" if one is missing."""
    compiler = "jax-cuda12-pjrt" if platform == "cuda" else "libtpu"
    return {name: package_version(name, "") for name in ("jax", "jaxlib", compiler, "m4")}


def one_at_a_time() -> AbstractContextManager[None]:
    """Waits until no other plan of this user compiles here, as each takes much memory."""
    path = Path(tempfile.gettempdir()) / f"m4-plan.{os.getuid()}.lock"
    return local_lock(path, "m4 plan", seconds=-1)


def compiled(
    config: str, arguments: Sequence[str], machine: str, program: str, console: Console
) -> dict[str, Any]:
    """Runs `m4 plan ARGUMENTS --facts=...` and returns the facts it writes, with `config`.

    Raises:
        InputError: The config or the arguments have a mistake, or a signal ended the compiler.
        RuntimeError: Any other failure, with the subprocess's standard error.
    """
    platform = topology(machine).chip.platform
    check_compiler(platform)
    environment = {**os.environ, **ENVIRONMENT}
    if platform == "cuda" and CUDA_COMPILER.is_dir():
        folders = [str(CUDA_COMPILER), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    given = [*arguments, f"--topology={machine}", f"--program={program}"]
    waiting = console.status(f"compiling {config} for {machine}, one plan at a time: minutes")
    with waiting, one_at_a_time(), tempfile.TemporaryDirectory(prefix="m4-plan-") as folder:
        path = Path(folder) / "facts.json"
        done = subprocess.run(
            [sys.executable, "-m", "m4", "plan", *given, f"--facts={path}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        errors = done.stderr.strip()
        if done.returncode == 2:
            raise InputError(errors.splitlines()[-1].removeprefix("m4 plan: "))
        if done.returncode < 0:
            name = signal.Signals(-done.returncode).name
            why = "it needs 4 to 6 GiB of free memory" if name == "SIGKILL" else FAULT
            raise InputError(f"{name} ended the compiler ({compiler(platform)}): {why}")
        if done.returncode or not path.is_file():
            raise RuntimeError(
                f"the compiling process ended with status {done.returncode}:\n{errors}"
            )
        for line in errors.splitlines():
            if not any(noise in line for noise in _NOISE):
                print(line, file=sys.stderr)
        return {"config": config, **json.loads(path.read_text(encoding="utf-8"))}


def compiler(platform: str) -> str:
    """Returns name and version of the compiler, such as "libtpu 0.0.42.1"."""
    return " ".join(list(versions(platform).items())[2])
