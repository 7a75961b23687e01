"""Optimizers: Adafactor for each matrix by itself, AdamW and Muon; rates by part of the model.

Each is a function of the total number of steps that returns an optax.GradientTransformation.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from m4.model.layers import names_of
from m4.settings import Between, Factor, OneOf, Period, Rate, SettingError, Size, Steps, checked
from m4.train.average import updated
from m4.train.schedules import Schedule, rsqrt

Array = jax.Array
_Positive = Annotated[float, Between(0, 1e6, above=True)]


def is_stacked(path) -> bool:
    """Returns whether a parameter's first axis counts the layers of a scanned stack."""
    return any(name.endswith("_blocks") for name in names_of(path))


class Moments(NamedTuple):
    """Factored second moments of matrices [..., R, C]."""

    rows: Array  # [..., R]
    columns: Array  # [..., C]


class FactoredState(NamedTuple):
    """State of `scale_by_matrix`."""

    count: Array  # steps done, int32 scalar
    # `Moments` of each parameter, or an array of its shape where its matrices are too small.
    moments: Any


def scale_by_matrix(smallest_factored: int) -> optax.GradientTransformation:
    """Returns Adafactor's update of each matrix by itself, without the learning rate.

    Source: Shazeer and Stern 2018 (arXiv 1804.04235), algorithms 4 to 6. A matrix is the last two
    axes of a parameter. Its update is g / sqrt(moment), divided by its root mean square if that is
    above 1, times the matrix's own root mean square (at least 1e-3). The moment decays by 1 -
    t^-0.8; factored, it is rows * columns / mean(rows). A parameter of one axis (in each layer of a
    scanned stack) is one block, which is not factored.

    On one matrix, it equals optax.adafactor. That factors the two LARGEST axes, so that with more
    experts than hidden units, experts would share statistics. It is also slower for large matrices
    on CPUs, because XLA recomputes the factors of rows and columns for every element, writes out
    squares that several sums share, and copies the weights. This is why there are barriers and
    `_one_after_gradients` (docs/performance.md).
    """

    def init(params):
        def moments(path, p):
            if _block_axes(path, p) == 2 and min(p.shape[-2:]) >= smallest_factored:
                return Moments(jnp.zeros(p.shape[:-1]), jnp.zeros(p.shape[:-2] + p.shape[-1:]))
            return jnp.zeros(p.shape)

        found = jax.tree_util.tree_map_with_path(moments, params)
        return FactoredState(jnp.zeros((), jnp.int32), found)

    def update(updates, state, params=None):
        assert params is not None
        kept = 1 - (state.count + 1).astype(jnp.float32) ** -0.8
        one = _one_after_gradients(updates)

        def scale_one(path, g, moment, p):
            axes = tuple(range(-_block_axes(path, p), 0))
            if isinstance(moment, Moments):
                scaled, moment = _scale_factored(g, moment, kept)
            else:
                moment = kept * moment + (1 - kept) * (jnp.square(g) + _SMALLEST)
                scaled = g * jax.lax.rsqrt(moment)
            scale = one / jnp.maximum(1.0, _rms(scaled, axes))
            scale = scale * jnp.maximum(_rms(p, axes), 1e-3)
            return scaled * jax.lax.optimization_barrier(scale), moment

        found = jax.tree_util.tree_map_with_path(scale_one, updates, state.moments, params)
        treedef = jax.tree.structure(params)
        pairs = treedef.flatten_up_to(found)
        scaled, moments = (treedef.unflatten(each) for each in zip(*pairs, strict=True))
        return scaled, FactoredState(state.count + 1, moments)

    return optax.GradientTransformation(init, update)


def _scale_factored(g: Array, moment: Moments, kept: Array) -> tuple[Array, Moments]:
    """Returns g [..., R, C] / sqrt(new moment) and that moment, with a share `kept` of the old."""
    means = []
    for axis in (-1, -2):
        g = _separate(g)
        means.append(jnp.mean(jnp.square(g), axis) + _SMALLEST)
    g = _separate(g)
    rows, columns = (kept * old + (1 - kept) * new for old, new in zip(moment, means, strict=True))
    factors = jax.lax.optimization_barrier(
        (jax.lax.rsqrt(rows / jnp.mean(rows, -1, keepdims=True)), jax.lax.rsqrt(columns))
    )
    scaled = g * factors[0][..., :, None] * factors[1][..., None, :]
    return scaled, Moments(rows, columns)


_SMALLEST = 1e-30  # smallest moment, as in optax and T5X, against division by 0


def _separate(x: Array) -> Array:
    """Hides x from XLA's CPU compiler, so that sums of squares do not share written squares."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def _one_after_gradients(gradients) -> Array:
    """Returns 1.0, on CPUs once all gradients are computed; otherwise XLA copies weights."""
    return jax.lax.platform_dependent(
        optax.tree.norm(gradients),
        cpu=lambda norm: jnp.where(jnp.isfinite(norm), 1.0, jnp.nan),
        default=jnp.ones_like,
    )


def _rms(x: Array, axes: tuple[int, ...]) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axes, keepdims=True))


def _block_axes(path, leaf) -> int:
    """Returns a block's number of axes: 2 for a matrix, 1 for a vector in each layer."""
    return min(leaf.ndim - is_stacked(path), 2)


def keep_tables(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps an optimizer so that it does not decay tables (`m4.model.layers.Table`)."""

    @_by_path
    def without_tables(path, leaf):
        return jnp.zeros_like(leaf) if names_of(path)[-1:] == ["table"] else leaf

    def update(updates, state, params=None):
        updates, state = inner.update(updates, state, params)
        return without_tables(updates), state

    return optax.GradientTransformation(inner.init, update)


class Accumulated(NamedTuple):
    """State of `every`."""

    count: Array  # gradients since the last update, int32 scalar
    total: Any  # Their sum, in each parameter's shape; with none, one that is no longer used.
    inner: Any  # state of the transformation that makes the updates


def every(steps: int, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs `inner` at every `steps`-th step, on the mean gradient since its last run.

    Between, updates are 0 and `inner` costs nothing, while optax.MultiSteps computes updates at
    every step and drops them. Learning rates come after it, so that schedules count all steps.
    """
    if steps == 1:
        return inner

    def init(params):
        total = optax.tree.zeros_like(params)
        return Accumulated(jnp.zeros((), jnp.int32), total, inner.init(params))

    def update(updates, state, params=None):
        # Resetting sums to 0 through the conditional would copy them at every step.
        is_first, is_last = state.count == 0, state.count == steps - 1
        total = jax.tree.map(lambda x, g: jnp.where(is_first, g, x + g), state.total, updates)

        def make(total, inner_state, params):
            return inner.update(jax.tree.map(lambda x: x / steps, total), inner_state, params)

        def wait(total, inner_state, params):
            del params
            return optax.tree.zeros_like(total), inner_state

        made, inner_state = jax.lax.cond(is_last, make, wait, total, state.inner, params)
        return made, Accumulated((state.count + 1) % steps, total, inner_state)

    return optax.GradientTransformation(init, update)


@checked
def adafactor(
    total_steps: Steps, *, schedule: Callable[[int], Schedule] = rsqrt,
    smallest_factored: Size = 128, weight_decay: Factor = 0.0,
) -> optax.GradientTransformation:  # fmt: skip
    """Returns Adafactor with GShard's settings (A.2): no momentum, decay 1 - t^-0.8, clipping at 1.

    Rates are relative to each matrix's root mean square.

    Args:
        schedule: total_steps -> (step -> rate).
        smallest_factored: Matrices with a smaller side keep a full second moment.
        weight_decay: Decay of a step, times the rate.
    """
    return keep_tables(
        optax.chain(
            scale_by_matrix(smallest_factored),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(schedule(total_steps)),
        )
    )


@checked
def adamw(
    total_steps: Steps, *, schedule: Callable[[int], Schedule] = rsqrt, b1: Rate = 0.9,
    b2: Rate = 0.98, eps: _Positive = 1e-9, weight_decay: Factor = 0.0, clip_norm: _Positive = 1.0,
    experts_every: Period = 1, experts_rate: _Positive | None = None,
) -> optax.GradientTransformation:  # fmt: skip
    """Returns AdamW with the Transformer's betas, after clipping the gradient's global norm.

    Weights of one axis (norm scales) are not decayed.

    Args:
        schedule: total_steps -> (step -> rate).
        b1, b2: Decay of the first and the second moment.
        eps: Number added to the root of the second moment.
        weight_decay: Decay of a step, times the rate.
        clip_norm: Largest global norm of the gradient.
        experts_every, experts_rate: See `muon`.
    """
    rate = schedule(total_steps)

    def clip(gradients, params):
        # optax.clip_by_global_norm divides every number by the norm, and XLA writes out the result,
        # which is 4 of the 15 passes of a step over an array of the weights' size.
        return optax.projections.projection_l2_ball(gradients, clip_norm)

    decay = _by_path(lambda path, p: p.ndim > 1 + is_stacked(path))

    def for_experts(k):
        return optax.chain(
            optax.scale_by_adam(b1**k, b2**k, eps), optax.add_decayed_weights(weight_decay, decay)
        )

    adam = optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay)
    adam = _experts_apart(adam, for_experts, rate, experts_every, experts_rate)
    return keep_tables(optax.chain(optax.stateless(clip), adam))


@checked
def muon(
    total_steps: Steps, *, schedule: Callable[[int], Schedule] = rsqrt,
    matrix_rate: _Positive = 1.0, experts: bool = True, beta: Rate = 0.95, b1: Rate = 0.9,
    b2: Rate = 0.98, eps: _Positive = 1e-9, experts_every: Period = 1,
    experts_rate: _Positive | None = None,
) -> optax.GradientTransformation:  # fmt: skip
    """Returns Muon (Jordan et al. 2024) for matrices in layers, Adam for other parameters.

    A matrix's update is its momentum with all singular values near 1 (five Newton-Schulz steps),
    times sqrt(max(1, columns / rows)). All singular directions move alike, so fewer steps are
    needed (docs/lab/2026-11-23-evaluation.md), but each costs more. Each expert and layer has its
    own matrix. Adam, with Nesterov's momentum, updates embeddings (also of tasks), logits, relative
    positions, routers (except the matrix of `noisy_topk`'s noise) and norm scales.

    Args:
        schedule: total_steps -> (step -> Adam's rate).
        matrix_rate: The matrices' rate divided by Adam's.
        experts: Whether experts' matrices are orthogonalized instead of left to Adam. They are most
            of a model's parameters and so of the Newton-Schulz products, and each sees only a part
            of the tokens.
        beta: Decay of the matrices' momentum.
        b1, b2, eps: See `adamw`.
        experts_every: Experts' parameters change at every k-th step, by the mean gradient of k
            steps; the optimizer of 64 experts takes a third of a step on CPUs. Their moments decay
            by beta^k per update, so that they remember as many steps.
        experts_rate: Factor of the experts' rate. Defaults to `experts_every`: updates have equal
            length for any k, and k updates within the moments' memory go the same way, so one that
            is k times as long goes as far. With 1, experts learn k times more slowly.
    """
    rate = schedule(total_steps)

    def kind(path, p):
        apart = not experts and _is_experts(path)
        return "matrix" if _is_within_a_layer(path, p) and not apart else "other"

    def for_experts(k):
        if not experts:
            return optax.scale_by_adam(b1**k, b2**k, eps, nesterov=True)
        return optax.chain(
            optax.trace(beta**k, nesterov=True), orthogonalize(), optax.scale(matrix_rate)
        )

    matrices = optax.chain(
        optax.trace(beta, nesterov=True),
        orthogonalize(),
        optax.scale_by_learning_rate(lambda step: matrix_rate * rate(step)),
    )
    others = optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=0.0, nesterov=True)
    both = optax.partition({"matrix": matrices, "other": others}, _by_path(kind))
    return keep_tables(_experts_apart(both, for_experts, rate, experts_every, experts_rate))


def _experts_apart(
    optimizer: optax.GradientTransformation,
    for_experts: Callable[[int], optax.GradientTransformation], rate: Schedule, steps: int,
    factor: float | None,
) -> optax.GradientTransformation:  # fmt: skip
    """Returns an optimizer that changes experts' parameters at every `steps`-th step."""
    factor = float(steps) if factor is None else factor
    if (steps, factor) == (1, 1.0):
        return optimizer

    experts = optax.chain(
        every(steps, for_experts(steps)),
        optax.scale_by_learning_rate(lambda step: factor * rate(step)),
    )
    label = _by_path(lambda path, _: "experts" if _is_experts(path) else "other")
    return optax.partition({"experts": experts, "other": optimizer}, label)


def orthogonalize() -> optax.GradientTransformation:
    """Makes all singular values of each matrix (the last two axes) near 1.

    The result, times sqrt(max(1, columns / rows)), is the update of optax's Muon without momentum.
    Small matrices of one shape make one batched product: separately, the 32 of a bilingual model
    take twice as long on a CPU core (480 products of a few microseconds). Matrices of experts and
    of scanned layers are stacked already, and CPUs use `newton_schulz` for them.
    """
    # Without momentum, so that updates are orthogonalized directly. The last two axes are the
    # matrix, and those before them count matrices.
    numbers = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    inner = contrib.scale_by_muon(
        beta=0.0, nesterov=False,
        weight_dimension_numbers=lambda params: jax.tree.map(lambda _: numbers, params),
    )  # fmt: skip

    def by_optax(stack) -> Any:
        updates: Any = inner.update([stack], inner.init([stack]))[0]
        return updates[0]

    def update(updates, state, params=None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, leaf in enumerate(leaves):
            # Larger matrices, and experts, may be sharded over devices.
            small = leaf.ndim == 2 and leaf.size <= _LARGEST_TOGETHER
            groups[leaf.shape if small else i].append(i)
        for group in groups.values():
            stack = jnp.stack([leaves[i] for i in group])
            *_, rows, columns = stack.shape
            if stack.ndim > 3:
                turned = jax.lax.platform_dependent(stack, cpu=newton_schulz, default=by_optax)
            else:
                turned = by_optax(stack)
            for i, leaf in zip(group, turned, strict=True):
                leaves[i] = max(1.0, columns / rows) ** 0.5 * leaf
        return jax.tree.unflatten(treedef, leaves), state

    return optax.GradientTransformation(optax.init_empty_state, update)


_LARGEST_TOGETHER = 2**16


def newton_schulz(x: Array) -> Array:
    """Makes float32 matrices [..., R, C] nearly orthogonal by five Newton-Schulz steps.

    These are optax's steps with the products in another order. A step is x <- q x, where
    q = a + b g + c g^2 and g = x x^T is the Gram matrix, so that the next g is q g q. Only the
    first and the last product have the long side C, and five steps of 128 x 512 take half the time
    (docs/lab/2026-11-25-tatoeba.md). TPUs must not use this, as their products in bfloat16 would
    make small eigenvalues of g negative.
    """
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = x.mT
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    a, b, c = _NEWTON_SCHULZ

    def polynomial(gram):
        identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=x.dtype), gram.shape)
        return a * identity + b * gram + c * (gram @ gram)

    gram = x @ x.mT
    product = q = polynomial(gram)
    for _ in range(4):
        gram = q @ gram @ q
        q = polynomial(gram)
        product = q @ product
    x = product @ x
    return x.mT if transposed else x


_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024


def _by_path(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a function from params to the tree of `function(path, parameter)`."""
    return functools.partial(jax.tree_util.tree_map_with_path, function)


def _is_experts(path) -> bool:
    return "experts" in names_of(path)


def _is_within_a_layer(path, leaf) -> bool:
    names = names_of(path)
    outside = {"router", "tasks", "noise", "logits_dense"}.intersection(names)
    return names[-1] == "kernel" and not outside and _block_axes(path, leaf) == 2


GROUPS = ("embeddings", "encoder", "decoder", "experts", "router")
ParameterRates = Mapping[Annotated[str, OneOf(GROUPS)], Factor]


def rate_of(path: Any, rates: ParameterRates) -> float:
    """Returns the learning-rate factor of the parameter at a tree path.

    "embeddings" includes the logits' matrix. "experts" (with a shared one) and "router" (the rest
    of a MoE layer: noise, tasks, biases) are for both stacks, and take precedence over "encoder"
    and "decoder". Unnamed parts have 1, or, in a MoE layer, the rate of the stack.
    """
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if names[0].endswith("token_embedder") or names[0] == "logits_dense":
        return rates.get("embeddings", 1.0)
    rate = rates.get("encoder" if names[0].startswith("encoder") else "decoder", 1.0)
    if "moe" not in names:
        return rate
    return rates.get("experts" if {"experts", "shared"} & {*names} else "router", rate)


def with_rates(
    optimizer: optax.GradientTransformation, rates: ParameterRates
) -> optax.GradientTransformation:
    """Multiplies an optimizer's updates, with weight decay, before averages see them."""

    def init(params: Any) -> Any:
        if not any(rate_of(path, rates) for path, _ in jax.tree_util.tree_leaves_with_path(params)):
            allowed = "above 0 for one group: no parameter would be trained"
            raise SettingError("Training.parameter_rates", dict(rates), allowed)
        return optimizer.init(params)

    @_by_path
    def times_rate(path: Any, leaf: Array) -> Array:
        rate = rate_of(path, rates)
        return rate * leaf if rate else jnp.zeros_like(leaf)

    def update(updates, state, params=None, *, scale=lambda updates: updates) -> tuple[Any, Any]:
        return updated(optimizer, updates, state, params, lambda given: times_rate(scale(given)))

    return optax.GradientTransformationExtraArgs(init, update)


def without_frozen_gradients(params: Any, rates: ParameterRates) -> Any:
    """Returns the parameters so that gradients of frozen ones are 0 without computation."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if rate_of(path, rates) else jax.lax.stop_gradient(leaf), params
    )


def with_frozen(before: Any, after: Any, rates: ParameterRates) -> Any:
    """Returns the parameters after a step, with frozen ones as before, even a gate's biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, old, new: new if rate_of(path, rates) else old, before, after
    )
