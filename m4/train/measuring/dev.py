"""Losses on dev sentences during training."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m4.data.cache.cache import Cache
from m4.data.directions import pair_of
from m4.data.stream.batches import Shape, evaluation_batches
from m4.data.stream.stream import Stream
from m4.model.transformer import Transformer
from m4.parallel.distributed import synchronized
from m4.parallel.mesh import axis_rules_context, host_rows, to_global
from m4.train.step import make_eval_step


def dev_loss(
    cache: Cache, stream: Stream, model: Transformer, mesh: Mesh, limit: int | None = None,
    aside: Collection[str] = (),
) -> Callable[[Any], dict[str, float]]:  # fmt: skip
    """Returns params -> {"dev/nll": nats per token, "dev/nll/<direction>": for each direction}.

    It uses packed rows of the training batch's shape, with at most `limit` pairs per direction.
    Directions of `aside` do not count for dev/nll.
    """
    directions = dev_directions(cache, stream)
    counts_D = np.array([name not in aside for name in stream.directions])
    jitted = jax.jit(
        make_eval_step(model, directions=len(stream.directions)),
        out_shardings=NamedSharding(mesh, PartitionSpec()),  # all processes read the sums
    )
    compiled = synchronized(jitted, "the program of dev losses")

    def run(params: Any) -> dict[str, float]:
        if not directions:
            return {}
        nll_D = tokens_D = np.zeros(len(stream.directions))
        with axis_rules_context(mesh):
            for batch in dev_batches(cache, stream, mesh, limit):
                sums = jax.device_get(compiled(params, batch))
                nll_D, tokens_D = nll_D + sums["nll_sum_D"], tokens_D + sums["tokens_D"]
        result = {"dev/nll": float(nll_D[counts_D].sum() / max(tokens_D[counts_D].sum(), 1))}
        for direction in directions:
            i = stream.directions.index(direction)
            result[f"dev/nll/{direction}"] = float(nll_D[i] / max(tokens_D[i], 1))
        return result

    return run


def dev_directions(cache: Cache, stream: Stream) -> list[str]:
    """Returns the training directions that have dev sentences."""
    return [d for d in stream.directions if cache.size(pair_of(d), "dev")]


def dev_batches(
    cache: Cache, stream: Stream, mesh: Mesh, limit: int | None
) -> Iterator[dict[str, jax.Array]]:
    """Yields dev sentences over the mesh, in packed rows of the training batch's shape."""
    directions = dev_directions(cache, stream)
    # A gate may know directions by number, so these are the training's numbers.
    number = np.array([stream.directions.index(d) for d in directions], np.int32)
    shape = Shape(stream.batch_rows, stream.source_length, stream.target_length)
    for batch in evaluation_batches(cache, directions, "dev", shape, limit):
        for name in ("direction_ids", "encoder_direction_ids"):
            batch[name] = number[batch[name]]
        yield to_global(mesh, host_rows(mesh, batch))
