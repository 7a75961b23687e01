"""What must divide over the mesh for a step to run: the model's sizes and the batches'."""

import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from m4.model import pipeline
from m4.model.transformer import Transformer
from m4.parallel.mesh import check_divides, split_axes
from m4.settings import SettingError, nearest_valid
from m4.train.loop.batches import BatchShape


def check_model(mesh: Mesh, model: Transformer) -> None:
    """SettingError where an array of the model cannot be split evenly over the mesh."""
    width = model.heads * model.head_width
    check_divides(mesh, "width", model.width, "embed", "Transformer.width")
    check_divides(mesh, "attention", model.heads, "heads", "Transformer.heads")
    joined = "attention: heads * head_width"
    check_divides(mesh, joined, width, "joined_kv", "Transformer.head_width")
    check_divides(mesh, "attention", model.head_width, "kv", "Transformer.head_width")
    check_divides(mesh, "feed-forward", model.mlp_width, "mlp", "Transformer.mlp_width")
    shared = model.source_vocab_size is None
    vocabularies = {("" if shared else "target_") + "vocabulary_size": model.vocab_size}
    if model.source_vocab_size is not None:
        vocabularies["vocabulary_size"] = model.source_vocab_size
    for setting, size in vocabularies.items():
        check_divides(mesh, "embedding, rounded up", size, "vocab", f"CorpusSpec.{setting}")
    for experts in (model.encoder_experts, model.decoder_experts):
        if experts is not None:
            assert experts.mlp_width is not None
            check_divides(mesh, "experts", experts.num_experts, "expert", "MoeLayer.num_experts")
            check_divides(mesh, "experts", experts.mlp_width, "expert_mlp", "MoeLayer.mlp_width")


def check_batches(
    mesh: Mesh,
    model: Transformer,
    shapes: Sequence[BatchShape],
    batch_size: int,
    grad_accum_steps: int,
) -> None:
    """SettingError where batches do not divide over the mesh or into accumulation steps.

    batch_size: rows of a full batch; where rows are sorted by length, shapes have other numbers.
    """
    for rows, source_length, target_length in shapes:
        check_divides(mesh, "batch", rows, "batch", "Training.batch_size")
        for length in (source_length, target_length):
            check_divides(mesh, "batch", length, "length", "CorpusSpec.lengths")
        check_accumulation(mesh, rows, grad_accum_steps, batch_size)
        try:
            pipeline.check(mesh, model, rows // grad_accum_steps, "Training.batch_size")
        except SettingError as error:
            if grad_accum_steps == 1 or error.setting != "Training.batch_size":
                raise
            allowed = f"{grad_accum_steps} (Training.grad_accum_steps) times {error.allowed}"
            raise SettingError(error.setting, rows, allowed) from None


def check_accumulation(
    mesh: Mesh | AbstractMesh, rows: int, grad_accum_steps: int, batch_size: int | None = None
) -> None:
    """SettingError where a batch's rows do not make that many equal parts on every device."""
    devices = rows_over(mesh)
    if rows % (devices * grad_accum_steps) == 0:
        return
    allowed = (
        f"a multiple of {devices * grad_accum_steps}: Training.grad_accum_steps = "
        f"{grad_accum_steps} parts on each of {devices} devices with different rows; "
        f"{nearest_valid(rows, devices * grad_accum_steps)}"
    )
    if batch_size not in (None, rows):
        allowed = f"such that batches have, where this one has {rows} rows, {allowed}"
    raise SettingError("Training.batch_size", batch_size or rows, allowed)


def rows_over(mesh: Mesh | AbstractMesh) -> int:
    """The number of shards of a batch's rows over the mesh."""
    return math.prod(mesh.shape[axis] for axis in split_axes(mesh, "batch"))
