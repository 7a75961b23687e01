"""Cosines between gradients of sets of directions, during training."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m4.data.cache.cache import Cache
from m4.data.samplers.learned import ALIGNMENT
from m4.data.stream.stream import Stream
from m4.model.transformer import Transformer
from m4.parallel.distributed import synchronized
from m4.parallel.mesh import axis_rules_context
from m4.settings import Period, SettingError, checked
from m4.train.measuring.dev import dev_batches
from m4.train.multitask.direction_groups import DirectionGroups
from m4.train.multitask.groups import Directions, Grouping, by_level, check_groups
from m4.train.multitask.surgery import gradients_of, gram
from m4.train.step import apply_model, cross_entropy

Array = jax.Array
COSINE = "gradients/cosine"  # metrics are named COSINE/<set>/<set> and ALIGNMENT<direction>
MOST_GROUPS = 40


@checked
@dataclasses.dataclass(frozen=True)
class GradientCosines:
    """Settings of the cosines between gradients of sets of directions.

    Gradients are of the mean loss on dev sentences, without dropout, smoothing and losses of MoE
    layers, as in Wang et al. 2021 (arXiv 2010.05874, section 3).

    Attributes:
        period: Number of steps between measurements.
        groups: Function that makes at most 40 sets of directions (`m4.train.multitask.groups`),
            whose gradients are in memory together.
        pairs: Number of dev pairs per direction.
    """

    period: Period = 1000
    groups: Grouping = by_level
    pairs: Period = 100

    def of(self, directions: Directions) -> dict[str, list[str]]:
        """Returns the sets of directions by name."""
        setting = "GradientCosines.groups"
        groups = check_groups(self.groups, directions, setting)
        if len(groups) > MOST_GROUPS:
            raise SettingError(setting, self.groups, f"at most {MOST_GROUPS}, not {len(groups)}")
        if wrong := [name for name in groups if "/" in name]:
            raise SettingError(setting, wrong[0], "a name without a slash")
        return groups


def gradient_cosines(
    cache: Cache, stream: Stream, model: Transformer, mesh: Mesh, settings: GradientCosines,
    directions: Directions,
) -> Callable[[Any], dict[str, float]]:  # fmt: skip
    """Returns the evaluation params -> row of metrics.

    "gradients/cosine/<a>/<b>" is the cosine of two sets' gradients, "gradients/alignment/
    <direction>" the mean cosine of its set with the others. Sets need dev sentences.
    """
    groups = settings.of(directions)
    names = list(groups)
    compared = DirectionGroups.compared(list(groups.values()), directions)
    whole = NamedSharding(mesh, PartitionSpec())

    def losses(params: Any, batch: Any) -> tuple[Array, None]:
        logits_BTV, _ = apply_model(model, params, batch, None)
        weights_BT, targets_BT = batch["decoder_loss_weights"], batch["decoder_target_tokens"]
        # Only `training_BT` has a gradient; without smoothing and z-loss, it is the nll.
        loss_BT = cross_entropy(logits_BTV, targets_BT).training_BT * weights_BT
        return compared.sums(loss_BT, batch["direction_ids"]), None

    stacked = gradients_of(losses, len(compared.members_GD))
    part = synchronized(jax.jit(lambda *a: stacked(*a)[0]), "the groups' gradients")
    add = jax.jit(lambda *trees: jax.tree.map(jnp.add, *trees), donate_argnums=0)
    products = jax.jit(lambda tree: gram(tree, "model")[0], out_shardings=whole)

    def run(params: Any) -> dict[str, float]:
        sums = None
        with axis_rules_context(mesh):
            for batch in dev_batches(cache, stream, mesh, settings.pairs):
                here = part(params, batch)
                sums = here if sums is None else add(sums, here)
            if sums is None:
                return {}
            return named(np.asarray(jax.device_get(products(sums))), names, groups)

    return run


def named(gram_GG: np.ndarray, names: list[str], groups: dict[str, list[str]]) -> dict[str, float]:
    """Returns the cosines of a Gram matrix as a row of metrics."""
    norm_G = np.sqrt(np.diagonal(gram_GG).astype(np.float64))
    here = np.flatnonzero(norm_G).tolist()
    with np.errstate(invalid="ignore"):  # sets without a gradient have no cosine
        cosine_GG = np.clip(gram_GG / (norm_G[:, None] * norm_G), -1, 1)
    row = {
        f"{COSINE}/{names[i]}/{names[j]}": float(f"{cosine_GG[i, j]:.6g}")
        for i in here
        for j in here
        if i < j
    }
    for i in here if len(here) > 1 else ():
        mean = np.mean([cosine_GG[i, j] for j in here if j != i])
        row |= {f"{ALIGNMENT}{name}": float(f"{mean:.6g}") for name in groups[names[i]]}
    return row
