"""JAX's process-wide settings, made in one place before the first computation."""

import contextlib
import os
import stat
from pathlib import Path

import jax
import zstandard
from jax._src import compilation_cache as programs

from m4.settings import InputError

# Size of a folder of compiled programs.
_MOST_BYTES = 2 << 30


def set_up(compilation_cache: Path | str | None = None) -> None:
    """Keeps compiled programs in a folder, so that a second run of a job does not compile again.

    JAX_COMPILATION_CACHE_DIR, where it is set, stays as it is. Programs of a cache are run, so it
    is ~/.cache/m4/compilation_cache, or the folder that is given: never one of a run's folder, nor
    one that another user made or could write to.
    """
    programs.compress_executable = _with_checksum
    if jax.config.values["jax_compilation_cache_dir"] is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "m4" / "compilation_cache"
        if compilation_cache is not None and _is_private(Path(compilation_cache)):
            folder = Path(compilation_cache)
        with contextlib.suppress(OSError):  # of a folder that cannot be written JAX warns
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _trim(folder, _MOST_BYTES)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # XLA's own caches would put the folder's path into the key of every program: a folder that
        # is copied, moved or on another machine would compile again.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _trim(folder: Path, most_bytes: int) -> None:
    """Removes the oldest programs beyond a size: those of other versions are never asked for."""
    found = [(path.stat(), path) for path in folder.glob("*-cache")]
    for stat_, path in sorted(found, key=lambda one: -one[0].st_mtime_ns):
        most_bytes -= stat_.st_size
        if most_bytes < 0:
            path.unlink(missing_ok=True)


def _with_checksum(executable: bytes) -> bytes:
    """Compresses a program with a checksum: else a flipped bit makes another one, which is run."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(executable)


def _is_private(folder: Path) -> bool:
    """Tells if the folder is this user's, and no other user can write there, or is missing."""
    if not folder.exists():
        return True
    found = folder.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def use_fake_devices(count: int) -> None:
    """Makes JAX show `count` CPU devices, all of them this machine's CPUs.

    It is called before JAX is used; where JAX runs already, its devices must be enough.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        known = jax.config.values["jax_num_cpu_devices"]
        jax.config.update("jax_num_cpu_devices", max(count, known))
    except RuntimeError:  # it runs already
        pass
    there = len(jax.devices("cpu"))
    if there < count:
        raise InputError(
            f"{count} devices are needed, JAX runs already with {there}: set JAX_NUM_CPU_DEVICES"
        )
