"""Arrays in safetensors files, which other frameworks read, and which never contain code."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from m4.settings import InputError
from m4.storage import records
from m4.storage.checkpoints import check_weights
from m4.storage.files import check_input, confined, read_json, whole
from m4.storage.records import record, text

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_READ = ("F32", "BF16", "F16")
_INDEX = record({"weight_map": records.named(text)})


def write(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Writes "a/b" -> array, named "a.b" in the file, with text for its header."""
    # The library writes raw memory, so arrays must be in C order.
    named = {name.replace("/", "."): np.asarray(a, order="C") for name, a in arrays.items()}
    with whole(path) as part:
        save_file(named, part, dict(about))


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns "a/b" -> array. Raises InputError if the file is missing or cut off."""
    check_input(path)
    with _errors(path):
        return {name.replace(".", "/"): array for name, array in load_file(path).items()}


class Weights:
    """Arrays of a model in a folder, from one file or from shards listed in an index.

    An array is read on demand, by its name in the file ("a.b").
    """

    def __init__(self, folder: Path) -> None:
        """Opens a folder. Raises InputError for missing files or unsupported numbers."""
        self.files: dict[str, Path] = {}  # name -> file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: set[str] = set()  # number formats of the arrays
        index, named = folder / INDEX, dict[str, str]()
        if index.is_file():
            named = read_json(index, _INDEX)["weight_map"]
        elif not (folder / SINGLE).is_file():
            pickles = [path.name for path in folder.glob("pytorch_model*")]
            raise InputError(
                f"{folder}: has neither {SINGLE} nor {INDEX}"
                + (f"; {pickles[0]} is a pickle, which m4 never reads" if pickles else "")
            )
        for file in sorted({*named.values()}) or [SINGLE]:
            path = confined(folder, file)
            if not path.is_file():
                raise InputError(f"{index}: names {file}, which is not in the folder")
            with _errors(path), safe_open(path, "np") as opened:
                for name in [*opened.keys()]:
                    about = opened.get_slice(name)
                    if (kind := about.get_dtype()) not in _READ:
                        said = f"{name} has numbers of type {kind}: must be {', '.join(_READ)}"
                        raise InputError(f"{path}: {said}")
                    self.shapes[name], self.files[name] = tuple(about.get_shape()), path
                    self.dtypes.add(kind)
        if missing := sorted(named.keys() - self.shapes.keys()):
            raise InputError(f"{index}: names {missing[0]}, which {named[missing[0]]} has not")

    def read(self, name: str) -> np.ndarray:
        """Returns an array as stored. Raises InputError if it is unreadable or not finite."""
        path = self.files[name]
        with _errors(path), safe_open(path, "np") as file:
            found = file.get_tensor(name)
        check_weights(path, {name: found})
        return found


@contextlib.contextmanager
def _errors(path: Path):
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error


def about(path: Path) -> dict[str, str]:
    """Returns the text in the header of a file."""
    with safe_open(path, "numpy") as file:
        return file.metadata() or {}
