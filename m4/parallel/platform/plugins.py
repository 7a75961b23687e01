"""JAX's plug-ins for GPUs, looked up without JAX."""

import importlib.util
import os
import pkgutil


def gpu_plugin() -> str | None:
    """The name of an installed one, such as "xla_cuda12"."""
    spec = importlib.util.find_spec("jax_plugins")
    if spec is None:
        return None
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    return next((name for name in sorted(names) if name.startswith(("xla_cuda", "xla_rocm"))), None)


def gpu_expected() -> bool:
    """Whether JAX is to compute on a GPU: a plug-in is installed, and JAX_PLATFORMS leaves it."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    return gpu_plugin() is not None and (not asked or asked.startswith(("cuda", "gpu", "rocm")))
