"""Loss, gradient and activations of single pairs: the slow and obvious way, a pair a row.

Without dropout, and without dropped tokens: what a pair has here does not depend on the others.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from m4.model.transformer import Transformer
from m4.train.loss import cross_entropy
from m4.train.step import apply_model
from m4.train.training import Training

Array = jax.Array
Rows = Mapping[str, np.ndarray]
# Rows of one call: losses need no more.
_LOSS_ROWS = 16
_SUBLAYERS = ("self_attention", "attention", "encoder_decoder_attention", "mlp", "moe", "")
_LAYER = re.compile(r"(encoder|decoder|layer)_\d+|\w*token_embedder|logits_dense|"
                    + "|".join(_SUBLAYERS[:-1]))  # fmt: skip


class Extreme(NamedTuple):
    """A layer's output for a pair: the largest absolute value that is finite, how many are not
    finite, and whose expert's token that is (`_expert`)."""

    layer: str
    largest: float
    not_finite: int
    expert: int | None


class PairProbe:
    """A model's parameters, looked at through one pair at a time, on one device."""

    def __init__(self, model: Transformer, params: Any, training: Training, tokens: int):
        """params: on the host. tokens: real target tokens of the whole batch."""
        self._model, here = model, jax.devices()[0]
        self._params = jax.device_put(params, here)
        smoothed = functools.partial(
            cross_entropy, label_smoothing=training.label_smoothing, z_loss=training.z_loss
        )

        def losses_B(params: Any, rows: Mapping[str, Array]) -> tuple[Array, Array]:
            logits_BTV, _ = apply_model(model, params, rows, None)
            weights_BT = rows["decoder_loss_weights"]
            loss_BT = smoothed(logits_BTV, rows["decoder_target_tokens"]).training_BT
            # Padding that is NaN is no pair's.
            loss_BT = jnp.where(weights_BT > 0, loss_BT * weights_BT, 0)
            return jnp.sum(loss_BT, axis=1), jnp.sum(weights_BT, axis=1)

        def share(params: Any, row: Mapping[str, Array]) -> Array:
            return jnp.sum(losses_B(params, row)[0]) / tokens

        self._losses = jax.jit(losses_B)
        self._norm = jax.jit(lambda params, row: optax.tree.norm(jax.grad(share)(params, row)))
        self._extremes = jax.jit(functools.partial(_captured, model))

    def losses(self, rows: Rows) -> np.ndarray:
        """[pairs]: mean loss of a pair's tokens, as training has it, without auxiliary losses."""
        count = len(rows["direction_ids"])
        found = []
        for start in range(0, count, _LOSS_ROWS):
            part = {
                name: np.pad(a[start : start + _LOSS_ROWS], _padding(a, start))
                for name, a in rows.items()
            }
            sums_B, tokens_B = self._losses(self._params, part)
            found.append(np.asarray(sums_B) / np.maximum(np.asarray(tokens_B), 1))
        return np.concatenate(found)[:count]

    def gradient_norm(self, rows: Rows, pair: int) -> float:
        """Norm of a pair's part of the step's gradient: the parts add up to it (but for auxiliary
        losses)."""
        return float(self._norm(self._params, _row(rows, pair)))

    def extremes(self, rows: Rows, pair: int) -> list[Extreme]:
        """Of each layer, in the order in which it is computed."""
        found = jax.device_get(self._extremes(self._params, _row(rows, pair)))
        made = []
        for layer, (largest, not_finite, experts) in found.items():
            expert = None if experts is None else _expert(*experts)
            made.append(Extreme(layer, float(largest), int(not_finite), expert))
        return sorted(made, key=lambda extreme: _order(extreme.layer))


def worst(extremes: Sequence[Extreme]) -> Extreme:
    """The first layer with a value that is not finite, else the one with the largest."""
    broken = [one for one in extremes if one.not_finite]
    return broken[0] if broken else max(extremes, key=lambda one: one.largest)


def _row(rows: Rows, pair: int) -> dict[str, np.ndarray]:
    return {name: array[pair : pair + 1] for name, array in rows.items()}


def _padding(array: np.ndarray, start: int) -> list[tuple[int, int]]:
    missing = max(start + _LOSS_ROWS - len(array), 0)
    return [(0, missing), *[(0, 0)] * (array.ndim - 1)]


def _captured(model: Transformer, params: Any, row: Mapping[str, Array]) -> dict[str, Any]:
    """Layer -> (largest, not finite, of experts: size and experts of each token, else None)."""
    _, sown = apply_model(model, params, row, None, capture=_is_layer)
    block = 1 if model.moe is None else model.moe_every
    outputs: dict[str, Array] = {}
    experts: dict[str, Array] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(sown)[0]:
        _, *module, name = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        call = path[-1].idx if isinstance(path[-1], jax.tree_util.SequenceKey) else 0
        # The embedding that both stacks have is called by both.
        module = [f"decoder_{module[0]}"] if call else module
        for layer, part in _layers(module, value, block):
            if name == "__call__":
                outputs[layer] = part
            elif name == "expert_GSK":
                experts[layer] = part
    found: dict[str, Any] = {}
    for layer, x in outputs.items():
        finite = jnp.isfinite(x)
        of_tokens = None
        if layer in experts:
            size_S = jnp.max(
                jnp.where(finite, jnp.abs(x), jnp.inf).reshape(-1, x.shape[-1]), axis=-1
            )
            of_tokens = size_S, experts[layer].reshape(len(size_S), -1)
        found[layer] = (jnp.max(jnp.where(finite, jnp.abs(x), 0)), jnp.sum(~finite), of_tokens)
    return found


def _expert(size_S: np.ndarray, expert_SK: np.ndarray) -> int | None:
    """The expert of the token with the largest value; where tokens are not finite the one that has
    the largest share of such tokens."""
    broken_S = ~np.isfinite(size_S)
    assigned = expert_SK[expert_SK >= 0]
    if not assigned.size:
        return None
    if not broken_S.any():
        first = expert_SK[np.argmax(size_S)]
        return int(first[0]) if first[0] >= 0 else None
    counts = np.bincount(assigned)
    at = expert_SK[broken_S]
    broken = np.bincount(at[at >= 0], minlength=len(counts))
    return int(np.argmax(broken / np.maximum(counts, 1)))


def _is_layer(module: nn.Module, method: str) -> bool:
    """The layers of the stacks, what they consist of, and what is before and after them."""
    return method == "__call__" and bool(module.path) and bool(_LAYER.fullmatch(module.path[-1]))


def _layers(module: Sequence[str], value: Array, size: int) -> list[tuple[str, Array]]:
    """A module's path as "encoder_1/moe"; of a scanned stack, in blocks of `size`, one for each."""
    if not module[0].endswith("_blocks"):
        return [("/".join(module), value)]
    stack, index = module[0].removesuffix("_blocks"), int(module[1].removeprefix("layer_"))
    return [
        ("/".join([f"{stack}_{block * size + index}", *module[2:]]), value[block])
        for block in range(value.shape[0])
    ]


def _order(layer: str) -> tuple[int, list[int], int]:
    """Embeddings, the encoder's layers, the decoder's, the logits."""
    name, _, part = layer.partition("/")
    stages = ("encoder_", "decoder_", "logits_dense")
    stage = next((i for i, start in enumerate(stages, 1) if name.startswith(start)), 0)
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    return stage, numbers, _SUBLAYERS.index(part)
