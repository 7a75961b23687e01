"""CPUs of this process, JAX's plug-ins for GPUs, versions of packages and of m4; without JAX."""

import hashlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path


def available_cpus() -> list[int]:
    """Returns the numbers of the CPUs that this process may use, ascending.

    Only Linux reports them; elsewhere they are all CPUs.
    """
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def package_version(name: str, missing: str = "not installed") -> str:
    """Returns the version of an installed package; `missing` where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return missing


def code_digest(package: Path | None = None) -> str:
    """Returns the SHA-256 over the names and contents of the package's files.

    It is not git's commit: hosts get the code without its history, and uncommitted changes count.

    Args:
        package: Folder of the package. Defaults to m4 as it is imported.
    """
    package = Path(__file__).parents[2] if package is None else package
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".j2"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def gpu_plugin() -> str | None:
    """Returns the name of an installed plug-in, such as "xla_cuda12", or None."""
    spec = importlib.util.find_spec("jax_plugins")
    if spec is None:
        return None
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    return next((name for name in sorted(names) if name.startswith(("xla_cuda", "xla_rocm"))), None)


def gpu_expected() -> bool:
    """Tells if JAX will compute on a GPU: a plug-in is installed, and JAX_PLATFORMS leaves it."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    return gpu_plugin() is not None and (not asked or asked.startswith(("cuda", "gpu", "rocm")))
