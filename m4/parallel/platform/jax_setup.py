"""Process-wide settings of JAX: accelerator, compiled programs, fake devices.

An accelerator that was asked for is used, or one line says why it cannot be. If a GPU's driver is
missing, JAX itself continues on the CPU after a traceback, or fails with a bare AssertionError for
JAX_PLATFORMS=cuda. A job that would run 50 times too slowly is a mistake to report, not to work
around.
"""

import contextlib
import functools
import importlib.util
import logging
import os
import stat
import sys
from pathlib import Path

import jax
import zstandard
from jax._src import compilation_cache as programs

from m4.parallel.platform.hardware import cache_folder, gpu_plugin
from m4.settings import InputError

_GPUS = ("cuda", "rocm", "gpu")


def set_up(compilation_cache: Path | str | None = None) -> None:
    """Keeps compiled programs in a folder, so that a second run of a job does not compile again.

    JAX_COMPILATION_CACHE_DIR has precedence. As cached programs are executed, the folder is
    ~/.cache/m4/compilation_cache or the given one: never one in a run's folder, nor one that
    another user made or could write to.
    """
    programs.compress_executable = _with_checksum
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = cache_folder() / "compilation_cache"
        if compilation_cache is not None and _is_private(Path(compilation_cache)):
            folder = Path(compilation_cache)
        with contextlib.suppress(OSError):  # JAX warns if a folder cannot be written
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _trim(folder, most_bytes=2 << 30)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # XLA's own caches would put the folder's path into the key of every program: a folder that
        # is copied, moved or on another machine would compile again.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _trim(folder: Path, most_bytes: int) -> None:
    """Removes the oldest programs beyond a size, as those of other versions are never used."""
    found = [(path.stat(), path) for path in folder.glob("*-cache")]
    for stat_, path in sorted(found, key=lambda one: -one[0].st_mtime_ns):
        most_bytes -= stat_.st_size
        if most_bytes < 0:
            path.unlink(missing_ok=True)


def _with_checksum(executable: bytes) -> bytes:
    """Compresses a program with a checksum, so that no program with a flipped bit is run."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(executable)


def _is_private(folder: Path) -> bool:
    """Returns whether only this user can write to the folder, or it does not exist."""
    if not folder.exists():
        return True
    found = folder.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def use_fake_devices(count: int) -> None:
    """Makes JAX show `count` CPU devices, which share this machine's CPUs.

    It is called before JAX is used; if JAX runs already, it must have enough devices.
    """
    with contextlib.suppress(RuntimeError):  # JAX runs already
        jax.config.update("jax_platforms", "cpu")
        known = jax.config.values["jax_num_cpu_devices"]
        jax.config.update("jax_num_cpu_devices", max(count, known))
    if (there := len(jax.devices("cpu"))) < count:
        said = f"JAX runs already with {there}: set JAX_NUM_CPU_DEVICES"
        raise InputError(f"{count} devices are needed, {said}")


def skip_libtpu() -> None:
    """Keeps JAX from looking for TPUs if libtpu is installed only for `m4 plan`.

    On a TPU host, JAX has set "tpu,cpu" by now. `m4.parallel.mesh` calls this, for all models.
    """
    if jax.config.values["jax_platforms"] is None and importlib.util.find_spec("libtpu"):
        plugin = gpu_plugin()
        jax.config.update("jax_platforms", f"{plugin.split('_')[1][:4]},cpu" if plugin else "cpu")


@functools.cache
def check_accelerator() -> None:
    """Starts JAX on the devices that JAX_PLATFORMS names first, or on a GPU with a plug-in.

    It prints a line on stderr if JAX_PLATFORMS=cpu leaves that plug-in unused.
    """
    plugin = gpu_plugin()
    skip_libtpu()
    asked = (jax.config.values["jax_platforms"] or "").split(",")[0]
    if asked in _GPUS and plugin is None:
        raise InputError(
            f"JAX_PLATFORMS={asked}, but JAX's plug-in for GPUs is not installed: "
            "`make setup CUDA=1` (docs/gpu.md), or JAX_PLATFORMS=cpu for the CPU"
        )
    on_gpu = asked in _GPUS or (not asked and plugin is not None)
    platform, said = _start()
    if on_gpu and platform != "gpu":
        raise InputError(
            "JAX can use no GPU; does `nvidia-smi` list one? It needs NVIDIA's driver, 525 or "
            "later (docs/gpu.md); JAX_PLATFORMS=cpu runs on the CPU"
            f"{f' ({said})' if said else ''}"
        )
    if platform is None:
        install = "; `make pod` installs libtpu" if asked == "tpu" else ""
        why = f"{said or 'no such device'}{install}; JAX_PLATFORMS=cpu runs on the CPU"
        raise InputError(f"JAX_PLATFORMS={asked}: {why}")
    if plugin is not None and platform == "cpu":
        print(
            f"on the CPU: JAX_PLATFORMS={asked} leaves the GPU's plug-in ({plugin}) unused",
            file=sys.stderr,
        )


def _start() -> tuple[str | None, str]:
    """Returns JAX's platform or None, and the first line of a plug-in's error.

    JAX alone would log that error with a traceback.
    """
    errors: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        error = record.exc_info[1] if record.exc_info else None
        errors.append(str(error or record.getMessage()).partition("\n")[0])
        return False

    platform, logger = None, logging.getLogger("jax._src.xla_bridge")
    logger.addFilter(keep)
    try:
        # JAX raises AssertionError if the only platform asked for has no device.
        with contextlib.suppress(AssertionError):
            platform = jax.default_backend()
    except RuntimeError as error:
        errors[:] = [str(error).partition("\n")[0]]
    finally:
        logger.removeFilter(keep)
    return platform, errors[0] if errors else ""
