"""Checks before a job of several processes starts that all of them will do the same.

Processes with different code, configs or versions of JAX compile different programs, and then wait
for each other for ever, or add up numbers that do not belong together.
"""

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

import jax

from m4.parallel import distributed
from m4.parallel.platform.hardware import code_digest, package_version
from m4.settings import InputError


def check_agreement(config: Mapping[str, str]) -> None:
    """Raises InputError, in every process, unless all have the same code, config and devices.

    All processes call it after jax.distributed.initialize, before anything is compiled. One process
    always agrees.
    """
    if jax.process_count() > 1:
        mine = json.dumps([socket.gethostname(), facts(config)])
        hosts, every = zip(*map(json.loads, distributed.texts_of_all("facts", mine)), strict=True)
        agree(hosts, every)


def facts(config: Mapping[str, str]) -> dict[str, str]:
    """Returns the facts that must be the same in all processes, by their names in messages."""
    return {
        "code": code_digest(),
        "config": config_digest(config),
        "process_count": str(distributed.declared_process_count()),
        "number of devices": str(jax.device_count()),
        "local devices": str(jax.local_device_count()),
        "kind of devices": jax.devices()[0].device_kind,
        **{name: package_version(name) for name in ("jax", "jaxlib", "libtpu")},
        # They decide what is compiled.
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }


def agree(hosts: Sequence[str], every: Sequence[Mapping[str, str]]) -> None:
    """Raises InputError, which says who differs in what, unless all processes have equal facts."""
    differences = []
    for name in every[0]:
        column = [each[name] for each in every]
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


def config_digest(config: Mapping[str, str]) -> str:
    """Returns the SHA-256 over the settings, in any order."""
    text = "\n".join(f"{name} = {value}" for name, value in sorted(config.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _short(value: str) -> str:
    if len(value) == 64 and not set(value) - set("0123456789abcdef"):
        return value[:12]
    return value or "not set"
