"""Searches that an earlier process has traced, kept next to compiled programs.

To trace and lower a search takes a seventh of the time until `m4 translate` answers; compiled
programs are found by what comes out of it. Kept is the search as StableHLO (`jax.export`), by the
digest of all that decides it: the files of every module that is loaded and of m4, JAX's settings,
the model, the settings of the search, the shapes. What the digest cannot know is traced again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax import export

from m4.eval.decoding.search import search
from m4.eval.decoding.settings import Method
from m4.parallel.platform.cpus import available_cpus
from m4.storage.files import whole

_DIGEST_BYTES = hashlib.sha256().digest_size


class _Unknown(TypeError):
    """A value that a digest cannot stand for."""


def traced_search(
    folder: Path,
    model: nn.Module,
    params: Any,
    tokens_BL: np.ndarray,
    target_length: int,
    beams: int,
    alpha: float,
    method: Method,
    more: Mapping[str, np.ndarray],
    *,
    grows: bool,
) -> tuple[jax.Array, jax.Array]:
    """As `search`, whose arguments these are: on a CPU, without sampling, traced once a folder.

    folder: of this user alone, as that of compiled programs: what is in it is run.
    """
    static = (target_length, beams, alpha, method, grows)
    try:
        known = None if method.sampling else _digest(model, static, (params, tokens_BL, more))
    except _Unknown:
        known = None
    if known is None or jax.default_backend() != "cpu":
        return search(model, params, tokens_BL, *static[:-1], more, grows=grows)
    program = _programs.get((folder, known))
    if program is None:
        path = folder / f"m4-traced-{known}-cache"
        found = _read(path)
        if found is None:
            try:
                found = export.export(search)(
                    model, params, tokens_BL, *static[:-1], more, grows=grows
                )
                _write(path, bytes(found.serialize()))
            except (ValueError, NotImplementedError):  # a gate that calls the host, or a C library
                return search(model, params, tokens_BL, *static[:-1], more, grows=grows)
        # Also the first time, so that all processes run the same program.
        program = _programs[folder, known] = jax.jit(found.call)
    return program(params, tokens_BL, more)


# (folder, digest) -> what is called, of this process.
_programs: dict[tuple[Path, str], Callable[..., tuple[jax.Array, jax.Array]]] = {}


def _read(path: Path) -> export.Exported | None:
    """What was kept; None: nothing, or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, program = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(program).digest() != digest:
        return None
    return export.deserialize(bytearray(program))


def _write(path: Path, program: bytes) -> None:
    # Where it cannot be written the next process traces again, as JAX compiles again.
    with contextlib.suppress(OSError), whole(path) as unfinished:
        unfinished.write_bytes(hashlib.sha256(program).digest() + program)


def _digest(model: nn.Module, static: tuple[Any, ...], arguments: Any) -> str:
    leaves, tree = jax.tree.flatten(arguments)
    parts = (
        _of(model),
        _of(static),
        str(tree),
        [(np.shape(leaf), str(leaf.dtype)) for leaf in leaves],
        sorted((name, repr(value)) for name, value in jax.config.values.items()),
        (sys.version, jax.__version__, len(available_cpus()), str(jax.devices())),
        _files(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _of(value: Any) -> Any:
    """What a value is, as a text that is the same in another process. _Unknown: it may not be."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, type | types.FunctionType) and "<" not in value.__qualname__:
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, functools.partial):
        return ("partial", _of(value.func), _of(value.args), _of(value.keywords))
    if isinstance(value, tuple | list):
        return (type(value).__qualname__, *map(_of, value))
    if isinstance(value, Mapping):
        return tuple((_of(key), _of(each)) for key, each in value.items())
    if isinstance(value, np.dtype):
        return value.str
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value) if each.name not in ("parent",)]
        return (_of(type(value)), *((name, _of(getattr(value, name))) for name in names))
    raise _Unknown(type(value))


@functools.cache
def _files() -> list[tuple[str, int, int]]:
    """The files of the modules that are loaded before the first search, and of m4: what a trace may
    run. Tracing loads more of JAX's."""
    return sorted(_found())


def _found() -> Iterator[tuple[str, int, int]]:
    loaded = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    own = Path(__file__).parents[2].rglob("*.py")
    for name in {*map(str, own), *(name for name in loaded if name)}:
        try:
            found = Path(name).stat()
        except OSError:  # of a module in an archive, or removed
            continue
        yield name, found.st_mtime_ns, found.st_size
