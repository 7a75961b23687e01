"""Reading and writing checkpoints in T5X's format, `checkpoint_<step>/`, by tensorstore.

Stock T5X reads two forms. `checkpoint` is an index in msgpack, with small arrays in it and zarr
arrays in folders next to it, like public checkpoints and those of `write`. `state/` has all arrays
in one OCDBT store by orbax, as T5X itself writes now. Arrays have names such as
`target/encoder/layers_0/mlp/wo/kernel`, `state/step` and `state/param_states/encoder/.../v_row`.
"""

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict

from m4.settings import InputError
from m4.storage.checkpoints import check_weights
from m4.storage.files import check_tree, undamaged, whole_folder

_VERSION = 3  # version of the index since 2021
_IN_INDEX = 1024  # arrays with fewer numbers are in the index itself
_CHUNK_BYTES = 64 << 20
_STEP_NAME = "state/step"
_STEP = re.compile(r"checkpoint_(\d+)")


def steps(folder: Path) -> dict[int, Path]:
    """Returns step -> folder for the checkpoints in a T5X MODEL_DIR, or {} for other folders."""
    if not folder.is_dir():
        return {}
    named = {path: _STEP.fullmatch(path.name) for path in folder.iterdir()}
    return {int(match[1]): path for path, match in named.items() if match and is_checkpoint(path)}


def is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder is a T5X checkpoint in either form."""
    return (folder / "checkpoint").is_file() or (folder / "state" / "manifest.ocdbt").is_file()


class T5xCheckpoint:
    """A checkpoint, with all `shapes` by name; arrays are read on demand."""

    def __init__(self, folder: Path) -> None:
        """Opens a checkpoint. Raises InputError if it is missing, unreadable or leads elsewhere."""
        if not is_checkpoint(folder):
            raise InputError(f"{folder}: no checkpoint of T5X (neither checkpoint nor state/)")
        check_tree(folder)
        self.folder = folder.absolute()
        index = self.folder / "checkpoint"
        self._leaves = self._indexed(index) if index.is_file() else self._stored()
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(leaf.shape) for name, leaf in self._leaves.items()
        }

    @functools.cached_property
    def step(self) -> int:
        """Number of steps for which the model was trained."""
        if _STEP_NAME not in self.shapes:
            raise InputError(f"{self.folder}: has no {_STEP_NAME}")
        found = self.read(_STEP_NAME)
        if found.size != 1 or found.dtype.kind not in "iu" or found.reshape(()) < 0:
            raise InputError(f"{self.folder}: {_STEP_NAME} is not a whole number of steps")
        return int(found.reshape(()))

    def read(self, name: str) -> np.ndarray:
        """Returns an array, bfloat16 as float32. Raises InputError if unreadable or not weights."""
        leaf = self._leaves[name]
        try:
            found = leaf.read().result() if isinstance(leaf, ts.TensorStore) else leaf
        except ValueError as error:
            raise self._unreadable(error, name) from error
        array = np.asarray(found)
        if name != _STEP_NAME:
            check_weights(self.folder, {name: array})
        return array.astype(np.float32) if array.dtype.name in ("bfloat16", "float16") else array

    def _indexed(self, index: Path) -> dict[str, Any]:
        content = index.read_bytes()
        if content.startswith(b"model_checkpoint_path"):
            raise InputError(f"{index}: a checkpoint of TensorFlow; t5x converts it to its own")
        with undamaged(index):
            tree: Any = serialization.msgpack_restore(content)
            leaves = flatten_dict(dict(tree.get("optimizer", tree)), is_leaf=_is_spec, sep="/")
            return {
                name: self._opened(name, leaf) for name, leaf in leaves.items() if leaf is not None
            }

    def _opened(self, name: str, leaf: Any) -> Any:
        """Returns a number or array of the index, or the zarr array that it names."""
        if not isinstance(leaf, Mapping):
            return np.asarray(leaf)
        # Versions of tensorstore before 0.1.14 wrote the path outside the store.
        path = leaf["kvstore"].get("path", leaf.get("path", ""))
        if not re.fullmatch(r"[\w.\-]+/?", path) or path.startswith(".."):
            raise InputError(f"{self.folder}: {name} names no folder in the checkpoint ({path!r})")
        place = {"driver": "file", "path": f"{self.folder / path}/"}
        return self._zarr(name, place)

    def _stored(self) -> dict[str, Any]:
        base = {"driver": "file", "path": f"{self.folder / 'state'}/"}
        try:
            keys = ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
        except ValueError as error:
            raise self._unreadable(error) from error
        names = [key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")]
        return {
            name.replace(".", "/"): self._zarr(
                name, {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            )
            for name in names
        }

    def _zarr(self, name: str, place: Mapping[str, Any]) -> Any:
        try:
            # A missing file would read as zeros.
            spec = {"driver": "zarr", "kvstore": place, "fill_missing_data_reads": False}
            return ts.open(spec, open=True).result()
        except ValueError as error:
            raise self._unreadable(error, name) from error

    def _unreadable(self, error: Exception, name: str = "state/") -> InputError:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        said = said.partition(" [tensorstore_spec=")[0]
        return InputError(f"{self.folder}: {name} cannot be read: {said}")


def write(folder: Path, step: int, arrays: Mapping[str, np.ndarray]) -> Path:
    """Writes `checkpoint_<step>` from all arrays but state/step; returns its path."""
    place = folder / f"checkpoint_{step}"
    with whole_folder(place) as unfinished:
        written = {
            name: _written(unfinished, name, np.asarray(array, order="C"))
            for name, array in {**arrays, _STEP_NAME: np.asarray(step, np.int32)}.items()
        }
        tree = unflatten_dict(written, sep="/")
        index = serialization.msgpack_serialize({"version": _VERSION, "optimizer": tree})
        (unfinished / "checkpoint").write_bytes(index)
    return place


def _written(folder: Path, name: str, array: np.ndarray) -> Any:
    """Returns an entry of the index: the array, or the spec of a zarr array that it writes."""
    if array.size < _IN_INDEX:
        return array
    rows = max(1, _CHUNK_BYTES // max(1, array.itemsize * math.prod(array.shape[1:])))
    spec = {
        "driver": "zarr",
        "dtype": array.dtype.name,
        "kvstore": {"driver": "file", "path": name.replace("/", ".")},
        "metadata": {
            "chunks": [min(rows, array.shape[0]), *array.shape[1:]],
            "compressor": {"id": "gzip", "level": 1},
            "shape": [*array.shape],
        },
    }
    place = {"driver": "file", "path": f"{folder.absolute() / name.replace('/', '.')}/"}
    ts.open({**spec, "kvstore": place}, create=True).result().write(array).result()
    return spec


def _is_spec(_: object, node: Mapping[str, Any]) -> bool:
    return {"driver", "kvstore"} <= node.keys()
