"""The machine: cache folder, CPUs, GPUs, huge pages, package versions. Does not import JAX."""

import hashlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
import sys
from pathlib import Path

from m4.parallel.platform import signals


def cache_folder() -> Path:
    """Returns the folder of copies, hashes and compiled programs on this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "m4"


def available_cpus() -> list[int]:
    """Returns the numbers of the CPUs that this process may use, ascending.

    Only Linux reports them; elsewhere all CPUs count.
    """
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def package_version(name: str, missing: str = "not installed") -> str:
    """Returns the version of a package, or `missing` if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return missing


def code_digest(package: Path | None = None) -> str:
    """Returns the SHA-256 over the names and contents of the package's files.

    git's commit would not do: hosts get the code without history, and uncommitted changes count.

    Args:
        package: Folder of the package. Defaults to the imported m4.
    """
    package = Path(__file__).parents[2] if package is None else package
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".j2", ".txt"):  # languages.txt decides scripts
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


# Huge pages for the process's memory, kept from step to step. XLA's CPU runtime allocates a step's
# temporaries anew: 97,000 page faults per step of a small model, but almost none in pages of 2 MB
# (docs/performance.md, "On CPUs"). The kernel finds huge pages slowly, so freed memory is kept.
# glibc reads the request for both only when a process starts.
TUNABLES = "GLIBC_TUNABLES"
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages_wanted(kernel: Path = KERNEL) -> bool:
    """Returns whether to request huge pages: on Linux with glibc, if programs may get them.

    An existing GLIBC_TUNABLES is kept.
    """
    asked = os.environ.get("JAX_PLATFORMS", "")
    if gpu_plugin() and (not asked or asked.startswith(("cuda", "gpu", "rocm"))):
        return False  # the GPU has a step's temporaries; one heap would slow its input
    if sys.platform != "linux" or TUNABLES in os.environ or platform.libc_ver()[0] != "glibc":
        return False
    return kernel.is_file() and "[never]" not in kernel.read_text()


def huge_pages_request() -> str:
    """Returns the value of GLIBC_TUNABLES."""
    asked = ["glibc.malloc.hugetlb=1"]  # madvise(MADV_HUGEPAGE); glibc 2.35, older ones ignore it
    # With more threads, waiting for the single heap was not measured.
    if len(available_cpus()) <= 8:
        asked += [
            "glibc.malloc.mmap_max=0",  # large memory, too, comes from the heap,
            "glibc.malloc.arena_max=1",  # which all threads share, as those of threads hold little,
            f"glibc.malloc.trim_threshold={4 * 2**30}",  # and whose end is kept up to 4 GiB
        ]
    return ":".join(asked)


def restart_with_huge_pages() -> None:
    """Replaces the process by itself, once, with the request in its environment."""
    if huge_pages_wanted():
        os.environ[TUNABLES] = huge_pages_request()
        with signals.blocked():
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
