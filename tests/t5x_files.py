"""Checkpoints of T5X, written by hand in the formats of msgpack and zarr, and T5's parameters."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np

_ARRAY = 1  # flax's number of an array in msgpack


def packed(array: np.ndarray) -> msgpack.ExtType:
    """Returns an array for the index itself."""
    return msgpack.ExtType(_ARRAY, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))


def zarr(folder: Path, array: np.ndarray) -> None:
    """Writes a zarr (version 2) array of two chunks along its first axis."""
    folder.mkdir()
    chunk = -(-array.shape[0] // 2), *array.shape[1:]
    about = {
        "zarr_format": 2, "shape": array.shape, "chunks": chunk, "dtype": array.dtype.str,
        "compressor": {"id": "gzip", "level": 6}, "fill_value": None, "order": "C", "filters": None,
    }  # fmt: skip
    (folder / ".zarray").write_text(json.dumps(about))
    for number in range(-(-array.shape[0] // chunk[0])):
        part = np.zeros(chunk, array.dtype)
        rows = array[number * chunk[0] : (number + 1) * chunk[0]]
        part[: len(rows)] = rows
        name = ".".join([str(number), *["0"] * (array.ndim - 1)])
        (folder / name).write_bytes(gzip.compress(part.tobytes()))


def write(folder: Path, step: int, arrays: Mapping[str, np.ndarray], driver: str = "file") -> Path:
    """Writes `folder/checkpoint_<step>`; arrays of two axes and more are in zarr.

    driver: the one of the machine that wrote it: file, gfile or gcs.
    """
    place = folder / f"checkpoint_{step}"
    place.mkdir(parents=True)
    tree: dict[str, Any] = {}
    for name, array in {**arrays, "state/step": np.int32(step).reshape(())}.items():
        *above, last = name.split("/")
        inner = tree
        for part in above:
            inner = inner.setdefault(part, {})
        if array.ndim < 2:
            inner[last] = packed(array)
            continue
        path = name.replace("/", ".")
        zarr(place / path, array)
        store = {"driver": driver, "path": f"{path}/"} | (
            {"bucket": "t5x-dummy-bucket"} if driver == "gcs" else {}
        )
        metadata = {"shape": array.shape, "chunks": array.shape, "compressor": {"id": "gzip"}}
        inner[last] = {
            "driver": "zarr", "dtype": array.dtype.name, "kvstore": store, "metadata": metadata
        }  # fmt: skip
    (place / "checkpoint").write_bytes(
        cast(bytes, msgpack.packb({"version": 3, "optimizer": tree}))
    )
    return place


def t5_parameters(
    *, rows: int, width: int = 16, heads: int = 2, head_width: int = 4, mlp_width: int = 32,
    layers: int = 2, seed: int = 0,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Returns random parameters of T5 1.1 (and mT5) by T5X's names."""
    draw = np.random.default_rng(seed)

    def random(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (scale * draw.standard_normal(shape)).astype(np.float32)

    made = {"token_embedder/embedding": random(rows, width, scale=1.0)}
    made["decoder/logits_dense/kernel"] = random(width, rows)
    both = heads * head_width
    for stack, attentions in (
        ("encoder", ("attention",)),
        ("decoder", ("self_attention", "encoder_decoder_attention")),
    ):
        made[f"{stack}/relpos_bias/rel_embedding"] = random(heads, 32)
        made[f"{stack}/{stack}_norm/scale"] = 1 + random(width)
        for layer in range(layers):
            at = f"{stack}/layers_{layer}"
            norms = ("attention", "mlp")
            if stack == "decoder":
                norms = ("self_attention", "cross_attention", "mlp")
            for norm in norms:
                made[f"{at}/pre_{norm}_layer_norm/scale"] = 1 + random(width)
            for attention in attentions:
                for name in ("query", "key", "value"):
                    made[f"{at}/{attention}/{name}/kernel"] = random(width, both)
                made[f"{at}/{attention}/out/kernel"] = random(both, width)
            for name in ("wi_0", "wi_1"):
                made[f"{at}/mlp/{name}/kernel"] = random(width, mlp_width)
            made[f"{at}/mlp/wo/kernel"] = random(mlp_width, width)
    return made


def scanned(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns parameters of scanned stacks: layers are axis 1, each has the position bias."""
    made, stacks = {}, {}
    for name, array in parameters.items():
        stack, _, rest = name.partition("/layers_")
        if rest:
            layer, _, inner = rest.partition("/")
            stacks.setdefault(f"{stack}/{stack}/{inner}", {})[int(layer)] = array
        else:
            made[name] = array
    depth = max(map(len, stacks.values()))
    for stack in ("encoder", "decoder"):
        bias = made.pop(f"{stack}/relpos_bias/rel_embedding")
        stacks[f"{stack}/{stack}/relpos_bias/rel_embedding"] = dict.fromkeys(range(depth), bias)
    return made | {
        name: np.stack([each[i] for i in range(len(each))], axis=1) for name, each in stacks.items()
    }


def targets(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the parameters under `target/`."""
    return {f"target/{name}": array for name, array in parameters.items()}
