"""The batches of training: what a stream is, and its batches over the mesh."""

import itertools
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from m4.parallel.layout import host_batch, host_shards, to_global

# (rows, source length, target length) of a batch.
BatchShape = tuple[int, int, int]


class BatchStream(Protocol):
    """batch(step) is a pure function of the step: nothing but the step is needed to resume."""

    directions: list[str]

    @property
    def shape(self) -> BatchShape:
        """The shape of its batches."""
        ...

    def batch(self, step: int, part: tuple[int, int] = (0, 1)) -> Mapping[str, np.ndarray]: ...
    def fingerprint(self) -> str: ...


def device_batches(
    mesh: Mesh, stream: BatchStream, start: int
) -> Generator[dict[str, jax.Array], None, None]:
    """Yields the batches from step `start` on, over the mesh; the next one is made meanwhile."""
    parts = host_shards(mesh)
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(host_batch, stream.batch, start, parts)
        for step in itertools.count(start + 1):
            batch = to_global(mesh, coming.result())
            coming = ahead.submit(host_batch, stream.batch, step, parts)
            yield batch
