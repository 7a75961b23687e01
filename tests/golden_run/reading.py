"""Reads what is compared from a run's folder, and hashes it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

# Names of metrics that differ from run to run contain one of these.
TIMES = ("seconds", "per_second", "goodput", "mfu", "model_flops")
_OF_A_SCORE = (
    "system", "direction", "split", "subset", "metric", "score", "low", "high", "sentences",
)  # fmt: skip


def batches(folder: Path, steps: int) -> dict[str, str]:
    """Returns the SHA-256 of the first batch, and of those of all `steps` steps."""
    from tests.golden_run.program import batch_of

    batch = batch_of(folder)
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
