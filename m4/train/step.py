"""The training state, the loss, and steps: (state, batch) -> (state, metrics)."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from m4.model.layers import constrain
from m4.model.moe import assigned_choices, bias_loads, layer_metrics, mean_metrics, move_biases
from m4.model.transformer import Transformer
from m4.parallel.mesh import rows_over
from m4.train.multitask.direction_groups import DirectionGroups
from m4.train.multitask.surgery import gradients_of
from m4.train.optimizer import with_frozen, without_frozen_gradients

if TYPE_CHECKING:
    from m4.train.training import Training

Array = jax.Array
Batch = Mapping[str, Array]


@struct.dataclass
class TrainState:
    """A training state, or the shardings of one in the same form."""

    step: Any  # steps done, int32 scalar
    params: Any  # tree of float32 arrays
    optimizer: Any  # the optimizer's state, a tree of float32 arrays and int32 counts


class TokenLoss(NamedTuple):
    """Losses of each target token, float32 [B, T]."""

    nll_BT: Array  # negative log-likelihood in nats
    training_BT: Array  # the loss that training minimises


def cross_entropy(
    logits_BTV: Array, targets_BT: Array, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> TokenLoss:
    """Returns -log p(target) and the training loss, with smoothed targets and z-loss.

    Only `training_BT` has a gradient, written by hand: one pass over the logits instead of several.
    All V ids share `label_smoothing` evenly (Szegedy et al. 2016, arXiv 1512.00567). `z_loss` is
    the factor of log(Z)^2, which keeps log(Z) near 0 (Mesh TensorFlow, T5X).
    """
    return _cross_entropy(logits_BTV, targets_BT, label_smoothing, z_loss)


def _forward(logits_BTV: Array, targets_BT: Array, label_smoothing: float, z_loss: float):
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    nll_BT = log_z_BT - target_BT
    training_BT = nll_BT
    if label_smoothing:
        uniform_BT = log_z_BT - jnp.mean(logits_BTV, axis=-1)
        training_BT = (1.0 - label_smoothing) * nll_BT + label_smoothing * uniform_BT
    training_BT = training_BT + z_loss * jnp.square(log_z_BT)
    return TokenLoss(nll_BT, training_BT), (logits_BTV, targets_BT, log_z_BT)


def _backward(label_smoothing: float, z_loss: float, saved, cotangents: TokenLoss):
    logits_BTV, targets_BT, log_z_BT = saved
    vocab = logits_BTV.shape[-1]
    softmax_BTV = jnp.exp(logits_BTV - log_z_BT[..., None])
    is_target_BTV = targets_BT[..., None] == jnp.arange(vocab, dtype=targets_BT.dtype)[None, None]
    training_BT = cotangents.training_BT
    # The barrier makes XLA compute these once per token, not for each of the V ids.
    scale_BT, target_BT, other_BT = jax.lax.optimization_barrier(
        (
            training_BT * (1.0 + 2.0 * z_loss * log_z_BT),
            training_BT * (1.0 - label_smoothing + label_smoothing / vocab),
            training_BT * (label_smoothing / vocab),
        )
    )
    smoothed_BTV = jnp.where(is_target_BTV, target_BT[..., None], other_BT[..., None])
    return softmax_BTV * scale_BT[..., None] - smoothed_BTV, None


_cross_entropy = jax.custom_vjp(lambda *given: _forward(*given)[0], nondiff_argnums=(2, 3))
_cross_entropy.defvjp(_forward, _backward)


def apply_model(
    model: Transformer, params, batch: Batch, dropout_key: Array | None, step: Array | None = None
):
    """Returns (logits_BTV, values sown by the layers); evaluation passes no key and no step."""
    logits_BTV, sown = model.apply(
        {"params": params}, batch["encoder_input_tokens"], batch["decoder_input_tokens"],
        batch["decoder_target_tokens"], encoder_segment_ids=batch.get("encoder_segment_ids"),
        decoder_segment_ids=batch.get("decoder_segment_ids"),
        encoder_positions=batch.get("encoder_positions"),
        decoder_positions=batch.get("decoder_positions"),
        encoder_direction_ids=batch.get("encoder_direction_ids"),
        decoder_direction_ids=batch.get("direction_ids"), step=step,
        enable_dropout=dropout_key is not None,
        rngs=None if dropout_key is None else {"dropout": dropout_key}, mutable=["intermediates"],
    )  # fmt: skip
    return logits_BTV, sown.get("intermediates", {})


def make_train_step(
    model: Transformer, optimizer: optax.GradientTransformation, training: "Training",
    directions: int, *, seed: Any = None, loss_weights: np.ndarray | None = None,
    groups: DirectionGroups | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:  # fmt: skip
    """Returns the step, a pure function to be jitted.

    loss = sum over real target tokens of the smoothed cross-entropy + z-loss, divided by their
    number, + aux_loss_factor * mean over MoE layers of the auxiliary loss (1 when balanced) +
    router_z_loss_factor * mean of the router's z-loss. Random numbers depend only on (seed, step),
    so that a resumed run draws the same ones as an uninterrupted run.

    Metrics are loss, nll (nats per token, neither smoothed nor with anything added), gradient_norm
    (before clipping), target_tokens, source_tokens, nll_sum_D and tokens_D by direction,
    `data_counts` (`count_data`), and the values that MoE layers sow: means over layers (load_E),
    `layers` with the same by layer, and `expert_loads` with choices by layer, direction and expert
    (int32; {} if the model counts none). With the surgery of `groups`, `conflicts` is the share of
    pairs of sets whose gradients point against each other.

    Args:
        optimizer: Optimizer, with the rates of `training.parameter_rates`.
        seed: Seed of dropout, random choices of gates and the surgery's order. Defaults to that of
            `training`.
        loss_weights: [directions], factors of their target tokens' losses. Defaults to 1. The sum
            is divided by the number of tokens in any case, and the metrics' nll is not weighted.
        groups: Sets of directions whose gradients are altered or that have separate rates. A set's
            share of the MoE layers' losses is its share of the batch's target tokens.
    """
    parts, rates = training.grad_accum_steps, training.parameter_rates or {}
    seed = training.seed if seed is None else seed
    factors = {
        "auxiliary_loss": training.aux_loss_factor,
        "router_z_loss": training.router_z_loss_factor,
    }

    # Contribution of some rows to the loss, or to each set's loss, [G], and metrics. `tokens`
    # counts the real target tokens of all rows, and share_G has the sets' shares of them.
    def loss_fn(params, batch: Batch, key: Array, step: Array, tokens: Array, *, share_G: Any):
        params = without_frozen_gradients(params, rates)
        logits_BTV, sown = apply_model(model, params, batch, key, step)
        targets_BT, weights_BT = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
        loss = cross_entropy(logits_BTV, targets_BT, training.label_smoothing, training.z_loss)
        training_BT = loss.training_BT * weights_BT
        if loss_weights is not None:
            training_BT = training_BT * jnp.asarray(loss_weights)[batch["direction_ids"]]
        total = jnp.sum(training_BT) / tokens
        # Means over layers; a part has the n-th part of the step's.
        moe, layers = jax.tree.map(lambda x: x / parts, (mean_metrics(sown), layer_metrics(sown)))
        if moe:
            for name, factor in factors.items():
                total = total + factor * moe[name]
        nll_BT = jax.lax.stop_gradient(loss.nll_BT) * weights_BT
        lost = total
        if groups is not None:
            more = sum(factor * moe[name] for name, factor in factors.items()) if moe else 0.0
            lost = groups.sums(training_BT / tokens, batch["direction_ids"]) + more * share_G
        return lost, {
            "loss": total, "nll": jnp.sum(nll_BT) / tokens, "target_tokens": jnp.sum(weights_BT),
            "source_tokens": jnp.sum(batch["encoder_input_tokens"] > 0),
            **by_direction(nll_BT, weights_BT, batch["direction_ids"], directions),
            "data_counts": count_data(batch, directions), **moe, "layers": layers,
            "expert_loads": assigned_choices(sown), "bias_loads": bias_loads(sown),
        }  # fmt: skip

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(seed, impl=training.rng), state.step)
        # Tokens of all parts, as the rows of a part depend on the mesh.
        counted = batch["decoder_loss_weights"], batch["direction_ids"]
        share_G = None if groups is None else groups.shares(*counted)
        part = functools.partial(loss_fn, share_G=share_G)
        gradient = gradients_of(part, None if groups is None else len(groups.members_GD))
        gradients, metrics = _gradients(gradient, parts, state, batch, key)
        if groups is None:
            updates, kept = optimizer.update(gradients, state.optimizer, state.params)
        else:
            # This generator gives the same numbers on every mesh and platform.
            order = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.step)
            updates, gradients, kept, more = groups.update(
                optimizer, gradients, state.optimizer, state.params, order
            )
            metrics |= more
        params = optax.apply_updates(state.params, updates)
        params = move_biases(params, metrics.pop("bias_loads"), parts)
        params = with_frozen(state.params, params, rates)
        metrics["gradient_norm"] = optax.tree.norm(gradients)
        return TrainState(state.step + 1, params, kept), metrics

    return train_step


def _gradients(
    part: Callable[..., Any], parts: int, state: TrainState, batch: Batch, key: Array
) -> tuple[Any, dict[str, Any]]:
    """Returns gradients and metrics of the rows, computed in `parts` consecutive parts."""
    tokens = jnp.maximum(jnp.sum(batch["decoder_loss_weights"]), 1.0)
    if parts == 1:
        return part(state.params, batch, key, state.step, tokens)

    def add(sums, numbered):
        rows, number = numbered
        own_key = jax.random.fold_in(key, number)
        found = part(state.params, rows, own_key, state.step, tokens)
        return jax.tree.map(jnp.add, sums, found), None

    batches = in_parts(batch, parts)
    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(part, state.params, first, key, state.step, tokens)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, (batches, jnp.arange(parts)))[0]


def in_parts(batch: Batch, n: int) -> dict[str, Array]:
    """Divides rows [B, ...] into n parts [n, B / n, ...], each with rows of every device.

    Each device divides its own rows, so nothing is sent.
    """
    devices = rows_over(jax.sharding.get_abstract_mesh())

    def cut(x: Array) -> Array:
        x = constrain(x.reshape(devices, n, -1, *x.shape[1:]), ("batch",))
        x = constrain(jnp.swapaxes(x, 0, 1), (None, "batch"))
        return constrain(x.reshape(n, -1, *x.shape[3:]), (None, "batch"))

    return {name: cut(x) for name, x in batch.items()}


def by_direction(
    nll_BT: Array, weights_BT: Array, ids_BT: Array, directions: int
) -> dict[str, Array]:
    """Sums nll and counts tokens by translation direction, each [directions]."""
    ids = ids_BT.reshape(-1)
    return {
        "nll_sum_D": jax.ops.segment_sum(nll_BT.reshape(-1), ids, num_segments=directions),
        "tokens_D": jax.ops.segment_sum(weights_BT.reshape(-1), ids, num_segments=directions),
    }


def count_data(batch: Batch, directions: int) -> dict[str, Array]:
    """Counts pairs, source_tokens and target_tokens by direction, int32 [directions].

    All ids but padding are tokens, including tag and eos. A pair begins where the decoder's input
    is 0 and its target is real.
    """
    source_BL, target_BT = batch["encoder_input_tokens"] > 0, batch["decoder_target_tokens"] > 0
    first_BT = target_BT & (batch["decoder_input_tokens"] == 0)

    def counted(here: Array, ids: Array) -> Array:
        flat = here.reshape(-1).astype(jnp.int32)
        return jax.ops.segment_sum(flat, ids.reshape(-1), num_segments=directions)

    return {
        "pairs": counted(first_BT, batch["direction_ids"]),
        "source_tokens": counted(source_BL, batch["encoder_direction_ids"]),
        "target_tokens": counted(target_BT, batch["direction_ids"]),
    }


def make_eval_step(
    model: Transformer, *, directions: int
) -> Callable[[dict, Batch], dict[str, Array]]:
    """Returns (params, batch) -> nll_sum_D and tokens_D, both [directions], without dropout."""

    def eval_step(params, batch: Batch) -> dict[str, Array]:
        logits_BTV, _ = apply_model(model, params, batch, None)
        weights_BT = batch["decoder_loss_weights"]
        nll_BT = cross_entropy(logits_BTV, batch["decoder_target_tokens"]).nll_BT * weights_BT
        return by_direction(nll_BT, weights_BT, batch["direction_ids"], directions)

    return eval_step
