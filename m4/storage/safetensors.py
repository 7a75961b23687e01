"""Arrays as one file of the safetensors format, which other frameworks read; data, never code."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from m4.settings import InputError
from m4.storage.files import whole


def write(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """One whole file. arrays: "a/b" -> array, "a.b" in the file. about: text for its header."""
    # The library writes the memory as it lies.
    named = {name.replace("/", "."): np.asarray(a, order="C") for name, a in arrays.items()}
    with whole(path) as part:
        save_file(named, part, dict(about))


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns "a/b" -> array.

    Raises:
        InputError: It is no such file, or cut off.
    """
    try:
        return {name.replace(".", "/"): array for name, array in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error


def about(path: Path) -> dict[str, str]:
    """Returns the text of the header of a file that `read` can read."""
    with safe_open(path, "numpy") as file:
        return file.metadata() or {}
