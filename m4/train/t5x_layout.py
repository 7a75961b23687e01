"""Converts parameter names and values of T5X's checkpoints to m4's, and back.

| a checkpoint of | its parameters |
| --- | --- |
| m4's module, trained by T5X | m4's own names and numbers |
| T5X's T5 (T5 1.1, mT5; also its scanned stacks) | `encoder/layers_0/...`: other names. T5 stores embeddings √M times larger, and queries' kernels √D times smaller, than m4, which multiplies by these numbers when it computes (docs/model.md) |

T5X's Adafactor keeps `v_row` and `v_col` for a parameter whose matrices it factors (`_row_is_last`
tells their axes), and `v` for others; the rest are placeholders with one number.
"""  # noqa: E501

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m4.settings import InputError
from m4.train.initial import Shapes, parts_of

Floats = npt.NDArray[np.floating]
Read = Callable[[str], np.ndarray]
TARGET, STATES = "target/", "state/param_states/"
_LEAST_FACTORED = 128  # T5X does not factor a matrix with a smaller side
# T5's names -> m4's, for parameters outside the layers.
_OUTSIDE = {
    "token_embedder/embedding": "token_embedder/embedding",
    "encoder/relpos_bias/rel_embedding": "encoder_bias/rel_embedding",
    "decoder/relpos_bias/rel_embedding": "decoder_bias/rel_embedding",
    "encoder/encoder_norm/scale": "encoder_norm/scale",
    "decoder/decoder_norm/scale": "decoder_norm/scale",
    "decoder/logits_dense/kernel": "logits_dense/kernel",
}
_IN_LAYER = re.compile(
    r"(?:(?:self_|encoder_decoder_)?attention/(?:query|key|value|out)|mlp/(?:wi|wi_0|wi_1|wo))"
    r"/kernel|pre_\w+_layer_norm/scale"
)
_RELPOS = "relpos_bias/rel_embedding"


class T5xParameter(NamedTuple):
    """Location of an m4 parameter in a checkpoint."""

    name: str  # the checkpoint's name, without "target/"
    layer: int | None = None  # its layer, if the array is of a scanned stack
    axis: int = 0
    factor: float = 1.0

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Returns the shape of m4's parameter."""
        whole = shapes[TARGET + self.name]
        return whole if self.layer is None else whole[: self.axis] + whole[self.axis + 1 :]

    def part(self, array: np.ndarray, axis: int | None = None) -> np.ndarray:
        """Takes the layer from a scanned stack's array, with layers along `axis`."""
        if self.layer is None:
            return array
        return np.take(array, self.layer, self.axis if axis is None else axis)


def sources(shapes: Shapes) -> dict[str, T5xParameter]:
    """Returns each parameter's location by m4's path. Raises InputError if m4 lacks one."""
    names = {n.removeprefix(TARGET): shape for n, shape in shapes.items() if n.startswith(TARGET)}
    if "encoder_norm/scale" in names:
        parts = parts_of(names).items()
        return {path: T5xParameter(name, None if path == name else block)
                for name, paths in parts for block, path in enumerate(paths)}  # fmt: skip
    if "encoder/encoder_norm/scale" in names:
        return dict(_of_t5(names))
    raise InputError(
        "its parameters are neither of m4's module nor of T5X's T5 (no encoder_norm/scale, no "
        "encoder/encoder_norm/scale)"
    )


def _of_t5(names: Shapes) -> Iterator[tuple[str, T5xParameter]]:
    width = names["encoder/encoder_norm/scale"][0]
    heads = next((shape[0] for name, shape in names.items() if name.endswith(_RELPOS)), None)
    if heads is None:
        raise InputError(f"it has no relative position bias ({_RELPOS}), as m4's model has")
    for name, shape in names.items():
        if name in _OUTSIDE:
            yield _OUTSIDE[name], T5xParameter(name, factor=t5_factor(name, width, 1))
            continue
        # layers_3/..., or in a scanned stack encoder/encoder/..., with layers as axis 1
        match = re.fullmatch(r"(encoder|decoder)/(?:layers_(\d+)|\1)/(.*)", name)
        if match is not None and match[2] is None and match[3] == _RELPOS:
            yield f"{match[1]}_bias/rel_embedding", T5xParameter(name, 0, 1)
            continue
        if match is None or not _IN_LAYER.fullmatch(match[3]):
            raise InputError(f"its parameter {name} {list(shape)} is none that m4's model has")
        stack, number, inner = match.groups()
        factor = t5_factor(inner, width, shape[-1] // heads)
        if number is not None:
            yield f"{stack}_{number}/{inner}", T5xParameter(name, factor=factor)
            continue
        for layer in range(shape[1]):
            yield f"{stack}_{layer}/{inner}", T5xParameter(name, layer, 1, factor)


def t5_factor(path: str, width: int, head_width: int) -> float:
    """Returns the ratio of m4's values of a parameter to T5's, by path."""
    if path.endswith("token_embedder/embedding"):
        return width**-0.5
    return math.sqrt(head_width) if path.endswith("query/kernel") else 1.0


def check_shared_bias(names: Shapes, read: Read) -> None:
    """Raises InputError if a scanned stack's layers differ in a table that m4 shares."""
    for stack in ("encoder", "decoder"):
        name = f"{TARGET}{stack}/{stack}/{_RELPOS}"
        if name in names:
            bias = read(name)
            if not np.array_equal(bias, np.broadcast_to(bias[:, :1], bias.shape)):
                raise InputError(
                    f"{name.removeprefix(TARGET)} differs between its {bias.shape[1]} layers, "
                    "which m4 reads as one table (relative_bias = 'shared')"
                )


def parameter(source: T5xParameter, read: Read) -> np.ndarray:
    """Reads m4's parameter from the checkpoint."""
    found = source.part(read(TARGET + source.name))
    return found if source.factor == 1.0 else (found * np.float32(source.factor))


def moments(source: T5xParameter, shapes: Shapes, read: Read) -> dict[str, Floats]:
    """Returns m4's second moments of a parameter.

    They are {"rows": [R], "columns": [C]} of its matrices, or {"": full} if T5X does not factor
    them. Gradients scale with 1 / factor, and moments with its square.
    """
    state, shape = f"{STATES}{source.name}/", shapes[TARGET + source.name]
    if f"{state}v" not in shapes:
        raise InputError(f"its {state}v is missing: not the state of T5X's Adafactor")
    if shapes.get(f"{state}m", (1,)) != (1,):
        raise InputError(f"its Adafactor has a momentum ({state}m), which m4's has not")
    scale = np.float32(source.factor**-2)
    if shapes[f"{state}v"] == shape:
        return {"": source.part(read(f"{state}v")) * scale}
    parts = {"rows": "v_row", "columns": "v_col"}
    if _row_is_last(source.name, shape, source.layer is not None):
        parts = {"rows": "v_col", "columns": "v_row"}
    counts = source.axis if source.layer is not None else None
    last = [i for i in range(len(shape)) if i != counts][-2:]  # the matrix
    found = {}
    for part, without in (("rows", last[1]), ("columns", last[0])):
        array = read(state + parts[part])
        if counts is not None:
            array = source.part(array, counts - (without < counts))
        found[part] = array * scale
    return found


def t5x_moments(
    name: str, shape: tuple[int, ...], given: Mapping[str, Floats], stacked: bool
) -> dict[str, Floats]:
    """Returns v_row, v_col, v and m of T5X's Adafactor for the result of `moments`."""
    none = {key: np.zeros(1, np.float32) for key in ("m", "v", "v_col", "v_row")}
    if not _is_factored(name, shape, stacked):
        full = given[""] if "" in given else together(given["rows"], given["columns"])
        return {**none, "v": full}
    rows, columns = given.get("rows"), given.get("columns")
    if rows is None or columns is None:
        rows, columns = given[""].mean(-1), given[""].mean(-2)
    if _row_is_last(name, shape, stacked):
        rows, columns = columns, rows
    return {**none, "v_row": rows, "v_col": columns}


def together(rows: Floats, columns: Floats) -> Floats:
    """Multiplies factors [..., R] and [..., C] to full moments [..., R, C]."""
    mean = rows.mean(-1, keepdims=True)[..., None]
    return rows[..., :, None] * columns[..., None, :] / mean


def _is_factored(name: str, shape: tuple[int, ...], stacked: bool) -> bool:
    """Returns whether T5X factors a parameter: by size with two axes, by logical axes with more."""
    if len(shape) == 2 and not stacked:
        return min(shape) >= _LEAST_FACTORED
    # Axes of routers and norms are not one row axis and one column axis.
    return len(shape) - stacked >= 2 and name.endswith("/kernel") and "/router/" not in name


def _row_is_last(name: str, shape: tuple[int, ...], stacked: bool) -> bool:
    """Returns whether `v_row` is of the last axis: the shorter of two, or the width of more."""
    if len(shape) == 2 and not stacked:
        return shape[1] < shape[0]
    return name.endswith(("/out/kernel", "/wo/kernel"))
