"""Checks before a job of several processes starts that all of them will do the same.

Processes with different code, configs or versions of JAX compile different programs, and then wait
for each other for ever, or add up numbers that do not belong together.
"""

import hashlib
import importlib.metadata
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from m4.parallel import distributed
from m4.settings import InputError

# Bytes of each gathered fact: their shape must be the same in all processes.
_BYTES = 64

Gather = Callable[[np.ndarray], np.ndarray]


def check_agreement(config: Mapping[str, str]) -> None:
    """Raises InputError, in every process, unless all have the same code, config and devices.

    All processes call it after jax.distributed.initialize, before anything is compiled. One process
    always agrees.

    Args:
        config: Setting -> value, as text.
    """
    if jax.process_count() > 1:
        counts = Counter(device.process_index for device in jax.devices())
        check_device_counts([counts[index] for index in range(jax.process_count())])
        agree(facts(config))


def facts(config: Mapping[str, str]) -> dict[str, str]:
    """Returns the facts that must be the same in all processes, by their names in messages."""
    return {
        "code": code_digest(),
        "config": config_digest(config),
        "process_count": str(distributed.declared_process_count()),
        "number of devices": str(jax.device_count()),
        "local devices": str(jax.local_device_count()),
        "kind of devices": jax.devices()[0].device_kind,
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "libtpu": _version("libtpu"),
        # They decide what is compiled.
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }


def agree(
    facts: Mapping[str, str],
    *,
    host: str | None = None,
    gather: Gather = multihost_utils.process_allgather,
) -> None:
    """Raises InputError unless all processes have the same facts; it says which differs in what.

    Args:
        facts: Name -> value; the names are the same in all processes. Values of more than 64 bytes
            are compared by their SHA-256.
        host: This process's name in the message. Defaults to the machine's name.
        gather: Maps uint8 [rows, 64] of this process to those of all, [processes, rows, 64].
    """
    values = [socket.gethostname() if host is None else host, *facts.values()]
    gathered_PRB = np.asarray(gather(np.stack([_encoded(value) for value in values])))
    hosts, *columns = zip(
        *[[_decoded(row_B) for row_B in rows_RB] for rows_RB in gathered_PRB], strict=True
    )
    differences = []
    for name, column in zip(facts, columns, strict=True):
        # The value that most have; without a majority, that of process 0.
        usual = Counter(column).most_common(1)[0][0]
        others = [index for index, value in enumerate(column) if value != usual]
        if others:
            first = others[0]
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            differences.append(
                f"process {first} ({hosts[first]}){more}: {name} {_short(column[first])}, "
                f"the other {len(column) - len(others)}: {_short(usual)}"
            )
    if differences:
        raise InputError(
            f"the {len(hosts)} processes do not agree, so nothing is started: "
            f"{'; '.join(differences)}"
        )


def check_device_counts(counts: list[int]) -> None:
    """Raises InputError where processes have different numbers of devices.

    It is apart from `agree`, because gathering needs as many devices in every process. Every
    process knows all counts, so that all raise the same.

    Args:
        counts: Number of devices of each process, in their order.
    """
    usual = Counter(counts).most_common(1)[0][0]
    others = [index for index, count in enumerate(counts) if count != usual]
    if others:
        raise InputError(
            f"the {len(counts)} processes do not agree, so nothing is started: process {others[0]} "
            f"has {counts[others[0]]} devices, {len(counts) - len(others)} have {usual}"
        )


def code_digest(package: Path | None = None) -> str:
    """Returns the SHA-256 over the names and contents of the package's files.

    It is not git's commit: hosts get the code without its history, and uncommitted changes count.

    Args:
        package: Folder of the package. Defaults to m4 as it is imported.
    """
    package = Path(__file__).parents[1] if package is None else package
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".j2"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def config_digest(config: Mapping[str, str]) -> str:
    """Returns the SHA-256 over the settings, in any order."""
    text = "\n".join(f"{name} = {value}" for name, value in sorted(config.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _encoded(text: str) -> np.ndarray:
    content = text.encode()
    if len(content) > _BYTES:
        content = hashlib.sha256(content).hexdigest().encode()
    return np.frombuffer(content.ljust(_BYTES, b"\0"), np.uint8)


def _decoded(row_B: np.ndarray) -> str:
    return row_B.astype(np.uint8).tobytes().rstrip(b"\0").decode()


def _short(value: str) -> str:
    """Shortens a hash to its beginning, as git does; other values stay whole."""
    if len(value) == 64 and not set(value) - set("0123456789abcdef"):
        return value[:12]
    return value or "not set"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
