"""Arrays as one file of the safetensors format, which other frameworks read; data, never code.

The file: 8 bytes with the header's length, a JSON header {name: {dtype, shape, data_offsets}}, and
the arrays one after the other, little-endian (github.com/huggingface/safetensors, "Format").
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from m4.settings import InputError
from m4.storage.files import whole

_NAMES = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "U32": np.dtype("uint32"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
_LARGEST_HEADER = 100_000_000  # the format's own limit


def write(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """One whole file. arrays: "a/b" -> array, "a.b" in the file. about: text for its header."""
    kinds = {dtype: name for name, dtype in _NAMES.items()}
    header: dict[str, object] = {"__metadata__": dict(about)}
    at = 0
    for name, array in arrays.items():
        header[name.replace("/", ".")] = {
            "dtype": kinds[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at := at + array.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with whole(path) as part, part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())


def read(path: Path) -> dict[str, np.ndarray]:
    """ "a/b" -> array. InputError: not such a file, or cut off."""
    try:
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        if length > min(_LARGEST_HEADER, len(content)):
            raise ValueError("its header is longer than the file")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        arrays = {}
        for name, about in header.items():
            start, stop = (8 + length + at for at in about["data_offsets"])
            dtype, shape = _NAMES[about["dtype"]], about["shape"]
            if stop > len(content):
                raise ValueError(f"{name}: the file ends before it")
            arrays[name.replace(".", "/")] = np.frombuffer(content[start:stop], dtype).reshape(
                shape
            )
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error
    return arrays
