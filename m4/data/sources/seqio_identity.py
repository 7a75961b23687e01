"""Identity of a seqio task's examples as JSON: its features, preprocessors and source."""

import ast
import functools
import hashlib
import inspect
import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from m4.data.sources.reading.files import digest

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


def identity_of(task: Any, splits: Mapping[str, str], use_cached: bool) -> dict[str, Any]:
    """Returns the identity of a task.

    It reads the files of the source, whose hashes are remembered, and the file of each function,
    without comments and layout. `splits` are m4's -> seqio's.
    """
    there = {theirs for theirs in splits.values() if theirs in task.splits}
    return {
        "features": {
            name: f"{feature.vocabulary} {feature.add_eos}"
            for name, feature in task.output_features.items()
        },
        "preprocessors": [described(one) for one in task.preprocessors],
        "from": _cached(task.cache_dir, there) if use_cached else _source(task.source, there),
    }


def described(value: Any) -> Any:
    """Returns a value as JSON.

    A function is its name, the hash of its file, and the arguments that are bound to it; other
    objects are text, without addresses in memory.
    """
    if isinstance(value, functools.partial):
        given = {**{str(i): v for i, v in enumerate(value.args)}, **value.keywords}
        return {"of": described(value.func), **{k: described(v) for k, v in given.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [described(one) for one in value]
    unwrapped = inspect.unwrap(value) if callable(value) else value
    named = unwrapped if hasattr(unwrapped, "__qualname__") else type(unwrapped)
    name = f"{named.__module__}.{named.__qualname__}"
    return f"{name} {code}" if (code := _code(named)) else name


def _code(named: Any) -> str | None:
    """Returns the SHA-256 of the file that defines a value, or None for installed code."""
    try:
        path = inspect.getsourcefile(named)
    except TypeError:  # built in
        path = None
    if path is None or path.startswith(_INSTALLED):
        return None
    return _code_of_file(path, os.stat(path).st_mtime_ns)


@functools.cache
def _code_of_file(path: str, _changed_ns: int) -> str:
    tree = ast.dump(ast.parse(Path(path).read_text(encoding="utf-8")))
    return hashlib.sha256(tree.encode()).hexdigest()[:16]


def _source(source: Any, splits: set[str]) -> dict[str, Any]:
    """Returns a seqio.DataSource as its files' hashes, its TFDS dataset, or its function."""
    about: dict[str, Any] = {"of": described(type(source))}
    if loader := getattr(source, "tfds_dataset", None):
        chosen = loader.tfds_splits or {}
        # The size first: then the name has the version.
        named = {
            s: [loader.size(s), loader.resolved_tfds_name(s), str(chosen.get(s, s))]
            for s in sorted(splits)
        }
        return {**about, "datasets": named}
    if patterns := getattr(source, "_split_to_filepattern", None):
        about["files"] = {split: _files(patterns[split]) for split in sorted(splits)}
    for name in ("_dataset_fn", "_reader"):
        if function := getattr(source, name, None):
            about["read"] = described(function)
    return about


def _files(pattern: Any) -> dict[str, list[Any]]:
    patterns = [pattern] if isinstance(pattern, str | os.PathLike) else pattern
    paths = [epath.Path(os.fspath(one)) for one in patterns]
    found = [file for path in paths for file in sorted(path.parent.glob(path.name))]
    return {file.name: digest(file) for file in found}


def _cached(folder: str, splits: set[str]) -> dict[str, Any]:
    """Returns the statistics and sizes of the files that seqio_cache_tasks wrote."""
    return {
        split: {
            path.name: digest(path)
            for path in sorted(epath.Path(folder).glob(f"*{split}*"))
            if path.is_file()
        }
        for split in sorted(splits)
    }
