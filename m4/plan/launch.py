"""A compilation in a process of its own: its environment, and one at a time on a machine.

The compilers are packages: libtpu, and for GPUs JAX's CUDA plugin, which works without CUDA and
without a GPU. Where there is no GPU the plugin complains at every start of JAX; so `make pod-gpu`
puts it in a folder beside the environment's packages, which compiling processes alone look into.

libtpu reads its environment once and takes gigabytes; nothing of that should stay in a process that
does something else. This file needs neither JAX nor gin.
"""

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from m4.parallel.supervise import end_with

# Raised with every change of the facts that a compiling process writes (`m4.plan.compile.facts`).
FORMAT = 3
# No device is wanted, so libtpu need not look for one, ask the cloud who it is, or keep others from
# a TPU that is not there. Where there is one, it is left alone.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    # Programs for devices that are not there cannot be loaded again.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    # CUDA is not there either.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
# Where `make pod-gpu` puts the compiler for GPUs.
CUDA_COMPILER = Path(sys.prefix) / "share" / "m4" / "cuda_compiler"
_CUDA = "jax_cuda12_plugin"
# What the compiler for GPUs says where there is no GPU, before it can be asked to be quiet.
_NOISE = ("before absl::InitializeLog() is called", "Could not find cuda drivers")
# Tells the compiling process who waits for it.
_PARENT = "M4_PLAN_PARENT"


class ChildError(Exception):
    """The compiling process ended with a mistake of the user's; its line is the message."""


def check_compiler(platform: str) -> None:
    """Raises a ValueError where the compiler for "tpu" or "cuda" is not installed."""
    if platform == "cuda":
        if not (CUDA_COMPILER / _CUDA).is_dir() and importlib.util.find_spec(_CUDA) is None:
            raise ValueError(
                "the compiler for GPUs is not installed: `make pod-gpu` (JAX's CUDA plugin, "
                "182 MB; neither a GPU nor CUDA is needed)"
            )
        return
    path = os.environ.get("TPU_LIBRARY_PATH")
    if path is not None:
        if not Path(path).is_file():
            raise ValueError(f"TPU_LIBRARY_PATH={path}: no such file")
    elif importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "the TPU compiler is not installed: `make pod`, or `pip install '.[pod]'` in a "
            "clone (libtpu, 205 MB; no TPU is needed)"
        )


def versions(platform: str = "tpu") -> dict[str, str]:
    """The packages that decide what a compilation gives; "": not installed as a package."""
    found = {}
    for name in ("jax", "jaxlib", "jax-cuda12-pjrt" if platform == "cuda" else "libtpu", "m4"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


@contextmanager
def one_at_a_time(folder: Path | None = None) -> Iterator[None]:
    """Waits until no other plan of this user compiles on this machine.

    Two at once would take twice the memory and as long as one after the other. The file stays: a
    lock is held by a process, not by a file's being there, and ends with it, however it ends.
    """
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    with (folder / f"m4-plan.{os.getuid()}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another plan is being made on this machine: waiting for it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_apart(arguments: Sequence[str], platform: str = "tpu") -> dict[str, Any]:
    """The facts that `m4 plan ARGUMENTS --facts=...` writes, from a process of its own.

    What that process says on its standard error, though its compilers are asked to be quiet, is
    passed on.

    Raises:
        ChildError: a mistake in config or arguments.
        RuntimeError: anything else; with all that the process said.
    """
    with one_at_a_time(), tempfile.TemporaryDirectory(prefix="m4-plan-") as folder:
        path = Path(folder) / "facts.json"
        command = [sys.executable, "-m", "m4", "plan", *arguments, f"--facts={path}"]
        environment = {**os.environ, **ENVIRONMENT, _PARENT: str(os.getpid())}
        if platform == "cuda" and CUDA_COMPILER.is_dir():
            folders = [str(CUDA_COMPILER), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        ended = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        said = ended.stderr.strip()
        if ended.returncode == 2:
            raise ChildError(said.splitlines()[-1].removeprefix("m4 plan: "))
        if ended.returncode or not path.is_file():
            raise RuntimeError(
                f"the compiling process ended with status {ended.returncode}:\n{said}"
            )
        for line in said.splitlines():
            if not any(noise in line for noise in _NOISE):
                print(line, file=sys.stderr)
        return json.loads(path.read_text(encoding="utf-8"))


def end_with_parent() -> None:
    """In the compiling process: it ends when the one that waits for it does, so that none goes on
    while the lock is free."""
    if parent := os.environ.get(_PARENT):
        end_with(int(parent))
