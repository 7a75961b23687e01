"""Reads what is compared from a run's folder, and hashes it; and the machine's key."""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from m4.parallel.platform.hardware import available_cpus

# Names of metrics that differ from run to run contain one of these.
TIMES = ("seconds", "per_second", "goodput", "mfu", "model_flops")
_OF_A_SCORE = (
    "system", "direction", "split", "subset", "metric", "score", "low", "high", "sentences",
)  # fmt: skip
_WIDEST_FIRST = ("avx512f", "avx2", "avx")


def batches(folder: Path, steps: int) -> dict[str, str]:
    """Returns the SHA-256 of the first batch, and of those of all `steps` steps."""
    import m4
    from m4.build import build
    from m4.jobs.corpus import open_corpus

    experiment = m4.load(folder).experiment
    batch = build(experiment, open_corpus(experiment)).stream.batch
    made = [of_arrays(dict(batch(step))) for step in range(steps)]
    return {"first batch": made[0], "all batches": _of_plain(made)}


def values(folder: Path) -> dict[str, Any]:
    """Returns the hashes of all that floating-point arithmetic decides, and losses as numbers."""
    rows = _rows(folder / "metrics.jsonl")
    for row in rows:
        for name in [name for name in row if any(part in name for part in TIMES)]:
            del row[name]
    found: dict[str, Any] = {
        "loss": [row["loss"] for row in rows if "loss" in row],
        "metrics": _of_plain(rows),
    }
    checkpoints = folder / "checkpoints"
    last = max((p for p in checkpoints.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    for item in sorted(last.iterdir()):
        if (item / "_METADATA").is_file():
            found[item.name] = of_arrays(tree(item))
    texts = {p.name: _rows(p) for p in sorted((folder / "decodes").glob("test.*-*.jsonl"))}
    if texts:
        found["translations"] = _of_plain(texts)
        scores = [{k: row[k] for k in _OF_A_SCORE} for row in _rows(folder / "scores.jsonl")]
        found["scores"] = _of_plain(scores)
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tree(item: Path) -> Any:
    """Returns an item of a checkpoint as whole arrays, whatever devices wrote it."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        about = reader.metadata(item).item_metadata.tree
        whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), about)
        return reader.restore(item, ocp.args.PyTreeRestore(restore_args=whole))


def of_arrays(tree: Any) -> str:
    """Returns the SHA-256 of names, types, shapes and bits of the arrays in a tree."""
    total = hashlib.sha256()
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    for path, leaf in sorted(leaves, key=lambda pair: jax.tree_util.keystr(pair[0])):
        array = np.ascontiguousarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def _of_plain(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def key() -> str:
    """Returns JAX's version, the CPU's instruction set, a hash of a small computation, and cores.

    Two kinds of CPU with one instruction set may be compiled for in two ways; the computation has
    the operations of a model, so that its bits differ where those of a model would.
    """
    cores = len(available_cpus())
    return f"jax {jax.__version__}, {instruction_set()}, {_probe()[:8]}, {cores} cores"


def instruction_set() -> str:
    """Returns the widest vector instructions of this CPU, or its architecture."""
    about = Path("/proc/cpuinfo")
    words = set(about.read_text(encoding="utf-8").split()) if about.is_file() else set()
    return next((name for name in _WIDEST_FIRST if name in words), platform.machine())


def _probe() -> str:
    """Returns the SHA-256 of a gradient through the operations of a transformer."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ w) * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return jnp.sum(jax.nn.log_softmax(hidden @ w.T, axis=-1)[:, 0])

    random = np.random.default_rng(0)
    w = random.standard_normal((96, 80)).astype(np.float32)
    x = random.standard_normal((48, 96)).astype(np.float32)
    gradient = jax.jit(jax.value_and_grad(loss))(w, x)
    return hashlib.sha256(b"".join(np.asarray(part).tobytes() for part in gradient)).hexdigest()
