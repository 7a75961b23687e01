"""Adafactor and AdamW (optax), and the learning-rate schedules.

An optimizer here is a function of the total number of steps -> optax.GradientTransformation.
"""

from collections.abc import Callable

import jax
import optax

Schedule = optax.Schedule


def rsqrt(
    total_steps: int,
    *,
    peak: float = 0.01,
    hold_steps: int = 10_000,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
) -> Schedule:
    """Inverse square root: peak until `hold_steps`, then peak * sqrt(hold_steps / step).

    The defaults are GShard's (arXiv 2006.16668, A.2: "1.0 with square-root decay after 10k steps":
    1.0 / sqrt(max(step, 10000)), so 0.01 at first).

    Args:
        total_steps: where the cooldown ends.
        peak: the highest rate. hold_steps: where the decay begins.
        warmup_steps: a linear rise from 0 before (the paper has none; Adam needs one).
        cooldown_steps: a linear fall to 0 at the end; what short runs gain most from.
    """

    def schedule(step):
        t = step + 1.0
        hold = float(max(hold_steps, warmup_steps, 1))
        rate = peak * jax.numpy.sqrt(hold / jax.numpy.maximum(t, hold))
        if warmup_steps:
            rate = rate * jax.numpy.minimum(1.0, t / warmup_steps)
        if cooldown_steps:
            left = (total_steps - step) / cooldown_steps
            rate = rate * jax.numpy.clip(left, 0.0, 1.0)
        return rate

    return schedule


def is_stacked(path) -> bool:
    """Whether a parameter of this tree path is a scanned stack's (`m4.model.blocks`): its first
    axis counts layers."""
    return any(
        isinstance(key, jax.tree_util.DictKey) and str(key.key).endswith("_blocks") for key in path
    )


def per_matrix(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `inner` to the last two axes of each parameter alone; leading axes are mapped over,
    and so is the axis of layers of a scanned stack.

    optax.adafactor factors the two LARGEST axes: with more experts than hidden units it would
    share statistics between experts. Mapped, a stack [E, M, F] behaves as E separate matrices.
    """

    def mapped(function, path, leaf):
        for _ in range(max(leaf.ndim - 2, int(is_stacked(path)))):
            function = jax.vmap(function)
        return function

    def init(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, p: mapped(inner.init, path, p)(p), params
        )

    def update(updates, state, params=None):
        assert params is not None
        leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
        states = treedef.flatten_up_to(state)
        values = treedef.flatten_up_to(params)
        results = [
            mapped(lambda g, s, p: inner.update(g, s, p), path, leaf)(leaf, s, p)
            for (path, leaf), s, p in zip(leaves, states, values, strict=True)
        ]
        return (
            treedef.unflatten([r[0] for r in results]),
            treedef.unflatten([r[1] for r in results]),
        )

    return optax.GradientTransformation(init, update)


def keep_tables(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, but parameters called `table` (`m4.model.moe.Table`) stay as they are, to the bit.

    They have no gradient, which stops neither weight decay nor noise. The state is `inner`'s.
    """

    def update(updates, state, params=None):
        updates, state = inner.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(_still, updates), state

    return optax.GradientTransformation(inner.init, update)


def _still(path, leaf):
    is_table = isinstance(path[-1], jax.tree_util.DictKey) and path[-1].key == "table"
    return jax.numpy.zeros_like(leaf) if is_table else leaf


def adafactor(
    total_steps: int,
    *,
    schedule: Callable[..., Schedule] = rsqrt,
    decay_rate: float = 0.8,
    clipping_threshold: float = 1.0,
    smallest_factored: int = 128,
    multiply_by_parameter_scale: bool = True,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Adafactor as GShard ran it (A.2): no first moment, second-moment decay 1 - t^-0.8, clip 1.0.

    Args:
        total_steps: for the schedule. schedule: (total_steps) -> step -> rate.
        decay_rate: the exponent. clipping_threshold: of the update's root mean square.
        smallest_factored: matrices with a smaller side keep a full second moment.
        multiply_by_parameter_scale: rates are relative to the parameter's root mean square.
        weight_decay: per step, times the rate.
    """
    # The order of optax.adafactor, every part on one matrix at a time.
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=decay_rate, min_dim_size_to_factor=smallest_factored
        ),
        optax.clip_by_block_rms(clipping_threshold),
    ]
    if multiply_by_parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    return keep_tables(
        optax.chain(
            per_matrix(optax.chain(*parts)),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(schedule(total_steps)),
        )
    )


def adamw(
    total_steps: int,
    *,
    schedule: Callable[..., Schedule] = rsqrt,
    b1: float = 0.9,
    b2: float = 0.98,
    eps: float = 1e-9,
    weight_decay: float = 0.0,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW with the Transformer's betas, after clipping the gradient's global norm.

    Args as optax.adamw; `schedule` is (total_steps) -> step -> rate. Weights of one axis (norm
    scales) are not decayed.
    """
    return keep_tables(
        optax.chain(
            optax.clip_by_global_norm(clip_norm),
            optax.adamw(
                schedule(total_steps),
                b1=b1,
                b2=b2,
                eps=eps,
                weight_decay=weight_decay,
                mask=lambda params: jax.tree_util.tree_map_with_path(
                    lambda path, p: p.ndim > 1 + is_stacked(path), params
                ),
            ),
        )
    )
