"""JAX's process-wide settings, made in one place before the first computation."""

from pathlib import Path

import jax


def set_up(compilation_cache: Path | str | None = None) -> None:
    """Keeps compiled programs in a folder, so that a second run of a job does not compile again."""
    if compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
