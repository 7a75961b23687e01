"""The accelerator that was asked for, or one line that says why it cannot be used.

JAX itself continues on the CPU where a GPU's driver is missing, after a traceback, and fails with a
bare AssertionError where JAX_PLATFORMS=cuda. A job that is 50 times slower than it should be is a
mistake to report, not to work around.
"""

import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from m4.parallel.platform.hardware import gpu_plugin
from m4.settings import InputError

_GPUS = ("cuda", "rocm", "gpu")


def skip_libtpu() -> None:
    """Keeps JAX from looking for TPUs where libtpu is installed for `m4 plan` alone.

    It would print lines about the host's name. JAX has set "tpu,cpu" on a TPU's host by now. The
    model's modules call this when they are imported, for programs that use m4's layers alone.
    """
    if jax.config.values["jax_platforms"] is None and importlib.util.find_spec("libtpu"):
        plugin = gpu_plugin()
        jax.config.update("jax_platforms", f"{plugin.split('_')[1][:4]},cpu" if plugin else "cpu")


@functools.cache
def check_accelerator() -> None:
    """Starts JAX on the devices that JAX_PLATFORMS names first, or the GPU that has a plug-in.

    It prints a line on stderr where JAX_PLATFORMS=cpu leaves that plug-in unused.
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
        raise InputError(
            f"JAX_PLATFORMS={asked}: {said or 'no such device'}{install}; JAX_PLATFORMS=cpu runs "
            "on the CPU"
        )
    if plugin is not None and platform == "cpu":
        print(
            f"on the CPU: JAX_PLATFORMS={asked} leaves the GPU's plug-in ({plugin}) unused",
            file=sys.stderr,
        )


def _start() -> tuple[str | None, str]:
    """Returns JAX's platform, or None, and the first line of an error."""
    with _errors_kept() as errors:
        try:
            platform = jax.default_backend()
        except RuntimeError as error:
            return None, str(error).partition("\n")[0]
        except AssertionError:  # JAX's own, where the only platform asked for has no device
            platform = None
    return platform, errors[0] if errors else ""


@contextmanager
def _errors_kept() -> Iterator[list[str]]:
    """Collects the first line of each plug-in error, which JAX would log with its traceback."""
    lines: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        error = record.exc_info[1] if record.exc_info else None
        lines.append(str(error or record.getMessage()).partition("\n")[0])
        return False

    logger = logging.getLogger("jax._src.xla_bridge")
    logger.addFilter(keep)
    try:
        yield lines
    finally:
        logger.removeFilter(keep)
