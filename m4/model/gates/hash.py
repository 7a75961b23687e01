"""Hash layers: a token's id decides its expert, through a table that is made once.

Source: Roller et al. 2021 (arXiv 2106.04426), section 3; tables "random", "balanced", "clustered".
"""

import functools
import heapq
import zipfile
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from scipy.cluster.vq import ClusterError, kmeans2

from m4.model.routing import Capacity, Routing, Tokens, plan_choices
from m4.settings import Count, InputError, OneOf, SettingError, checked


@checked
def hash(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    table: Annotated[str, OneOf(("random", "balanced", "clustered"))] = "random",
    seed: Count = 0,
    counts: str | None = None,
    embeddings: str | None = None,
) -> Routing:
    """Sends every token to expert table[id], with weight 1; no router and no auxiliary loss.

    The id is that of the layer's input; in a decoder, that of the token before the predicted one.
    The table is the parameter `hash/table`, which no optimizer changes: a trained model takes it
    from its checkpoint, whatever the options and files are by then; only `m4 train` reads files.
    Tokens beyond the capacity get no expert.

    Args:
        table: "random" is drawn with `seed`. "balanced" gives ids, by falling frequency, to the
            expert with the least load so far. "clustered" is k-means of the embeddings with `seed`.
        seed: Seed of the table.
        counts: For "balanced", an .npy file with the count of each id, such as the corpus's
            token_counts.npy. It may lack the ids by which the vocabulary is rounded up.
        embeddings: For "clustered", an .npy file [V, width], such as a trained model's embedding.
    """
    assert tokens.table is not None
    assert tokens.ids_GS is not None
    make = functools.partial(
        make_table, num_experts, table=table, seed=seed, counts=counts, embeddings=embeddings
    )
    table_V = tokens.table("hash", make)
    expert_GSK = table_V[tokens.ids_GS.astype(jnp.int32)][..., None]
    weight_GSK = jnp.ones(expert_GSK.shape)
    return plan_choices(expert_GSK, weight_GSK, tokens.mask_GS, num_experts, capacity(1))


# Layers with the same options share a table.
@functools.lru_cache(maxsize=8)
def make_table(
    num_experts: int,
    vocab_size: int,
    *,
    table: str,
    seed: int,
    counts: str | None = None,
    embeddings: str | None = None,
) -> np.ndarray:
    """Returns the expert of each id, int32 [V]; see `hash` for the arguments."""
    if table == "random":
        return np.random.default_rng(seed).integers(0, num_experts, vocab_size, np.int32)
    if table == "clustered":
        embeddings_VM = _load("embeddings", embeddings, vocab_size, axes=2)
        return _clustered(embeddings_VM, num_experts, vocab_size, seed)
    counts_V = _load("counts", counts, vocab_size, axes=1)
    counts_V = np.pad(counts_V, (0, vocab_size - len(counts_V)))
    table_V = np.zeros(vocab_size, np.int32)
    # At equal load, the expert with fewer ids comes first, so that unused ids are spread too.
    loads = [(0, 0, e) for e in range(num_experts)]
    for i in np.argsort(-counts_V, kind="stable"):
        load, ids, e = loads[0]
        table_V[i] = e
        heapq.heapreplace(loads, (load + int(counts_V[i]), ids + 1, e))
    return table_V


def _clustered(
    embeddings_VM: np.ndarray, num_experts: int, vocab_size: int, seed: int
) -> np.ndarray:
    points = embeddings_VM.astype(np.float64)
    different = len(np.unique(points, axis=0))
    if different < num_experts:
        raise InputError(
            f"hash.embeddings: {different} different rows do not make {num_experts} clusters"
        )
    try:
        _, cluster = kmeans2(
            points, num_experts, minit="++", missing="raise", rng=np.random.default_rng(seed)
        )
    except ClusterError as error:
        raise InputError(
            f"hash.embeddings: k-means with hash.seed = {seed} leaves one of the "
            f"{num_experts} experts without ids; try another seed"
        ) from error
    table_V = np.arange(vocab_size, dtype=np.int32) % num_experts
    table_V[: len(points)] = cluster
    return table_V


def _load(option: str, path: str | None, vocab_size: int, *, axes: int) -> np.ndarray:
    """Reads a file's array with a row per id of the vocabulary, which may be rounded up."""
    option = f"hash.{option}"
    if path is None:
        raise SettingError(option, path, "the name of an .npy file, for this hash.table")
    try:
        with open(path, "rb") as file:  # np.load by name would leave a damaged file open
            rows = np.load(file, allow_pickle=False)
    except FileNotFoundError as error:
        raise InputError(f"{option}: no file {path}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        rows = None
    # An .npz has several arrays.
    numbers = isinstance(rows, np.ndarray) and rows.dtype.kind in "iuf"
    if rows is None or not numbers or not np.isfinite(rows).all():
        raise InputError(f"{option}: {path} is not an .npy file of numbers")
    if rows.ndim != axes or not 1 <= len(rows) <= vocab_size:
        row = "a number" if axes == 1 else "a row of numbers"
        needed = f"{row} for an id, of at most {vocab_size} ids"
        raise InputError(f"{option}: {path} has the shape {rows.shape}; needed is {needed}")
    return rows
