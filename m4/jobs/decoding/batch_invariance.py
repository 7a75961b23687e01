"""`m4 decode --batch_invariance`: a sample of a test set in several batch sizes and over a mesh."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import jax
from rich.box import SIMPLE_HEAD
from rich.table import Table

from m4.data.cache.cache import Cache
from m4.data.preprocess import split_direction, tag
from m4.eval.decoding import batch_invariance
from m4.eval.decoding.batch_invariance import Compared, Placed, Way
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.testsets import Portion
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.corpus import open_corpus, test_sets
from m4.jobs.decoding.testsets import trained_step
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.parallel.mesh import make_mesh
from m4.progress import ProgressBar
from m4.settings import InputError


def check(experiment: Experiment, portion: Portion, step: int | None = None) -> int:
    """Prints, by direction, how many tokens of the translations change; returns their number.

    The mesh is the experiment's, or where that has one device, all devices with experts over as
    many as divide them.

    Raises:
        InputError: several processes; the corpus has no such direction; there is no checkpoint.
    """
    if distributed.is_distributed():
        raise InputError("--batch_invariance: one process alone compares one device with several")
    folder = prepare.run_folder(experiment)
    found = trained_step(folder, step)
    cache = open_corpus(experiment, test_sets)
    model = prepare.model_for(experiment, cache)
    layouts: list[Layout | None] = [None]
    if jax.device_count() > 1:
        layouts.append(_layout(experiment, model, cache))
    else:
        print(
            "one device is here: nothing is compared with a mesh (JAX_NUM_CPU_DEVICES=8 makes "
            "eight of a CPU)",
            file=sys.stderr,
        )
    checkpoints = folder / "checkpoints"
    placed = [
        Placed(restore_params(model, checkpoints, found, cache.vocabulary, one)[0], one)
        for one in layouts
    ]
    sources = {
        direction: [tag(source, split_direction(direction)[1]) for source, _ in pairs]
        for direction, pairs in portion.pairs(cache).items()
    }
    chosen = batch_invariance.ways(placed)
    with ProgressBar("batch invariance", len(chosen), "ways") as bar:
        rows = batch_invariance.changed_tokens(
            model, cache.vocabulary, sources, experiment.decoding, chosen, bar.update
        )
    return _show(rows, chosen, found)


def _layout(experiment: Experiment, model: Transformer, cache: Cache) -> Layout:
    layout = prepare.decoding_layout(experiment, model, cache.directions)
    if layout is not None:
        return layout
    experts = 1 if model.moe is None else model.moe().num_experts
    return Layout(make_mesh(expert=math.gcd(jax.device_count(), experts)))


def _show(rows: Mapping[str, Compared], chosen: Sequence[Way], step: int) -> int:
    table = Table(
        "direction", "sentences", "tokens", *(way.name for way in chosen[1:]),
        title=f"step {step}: tokens that differ from those of {chosen[0].name}",
        title_justify="left", box=SIMPLE_HEAD,
    )  # fmt: skip
    for direction, row in rows.items():
        changed = [str(row.changed[way.name]) for way in chosen[1:]]
        table.add_row(direction, str(row.sentences), str(row.tokens), *changed)
    prepare.console().print(table)
    every = sum(sum(row.changed.values()) for row in rows.values())
    tokens = sum(row.tokens for row in rows.values()) * (len(chosen) - 1)
    print(f"{every:,} of {tokens:,} tokens changed")
    return every
