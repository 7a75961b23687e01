"""JAX's process-wide settings, made in one place before the first computation."""

from pathlib import Path

import jax


def set_up(compilation_cache: Path | str) -> None:
    """Keeps compiled programs in a folder, so that a second run of a job does not compile again.

    Who has chosen a folder already (JAX_COMPILATION_CACHE_DIR) keeps it, with its own limits.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def use_fake_devices(count: int) -> None:
    """Has JAX show that many CPU devices, all of them this machine's cores.

    Before anything else uses JAX; where JAX runs already, its devices must be enough.

    Raises:
        ValueError: they are not.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        known = jax.config.values["jax_num_cpu_devices"]
        jax.config.update("jax_num_cpu_devices", max(count, known))
    except RuntimeError:  # it runs already
        pass
    there = len(jax.devices("cpu"))
    if there < count:
        raise ValueError(
            f"{count} devices are wanted, JAX runs already with {there}: set JAX_NUM_CPU_DEVICES"
        )
