"""Checks that the translations of a trained run do not depend on batch or devices.

    python benchmarks/batch_invariance.py --model_dir=runs/demo --directions=en-gl,gl-en

They should not: a sentence's padded length follows from its own length, a search keeps rows apart,
and no token is dropped. But programs of other shapes round differently, which decides between
candidates that are almost equal. The check translates sentences one by one on one device, then in
larger batches, in another order and over a mesh, and compares tokens. The exit status is 1 if any
differ.
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from m4.build import build
from m4.data.directions import split_direction
from m4.data.preprocess import tag
from m4.eval.decoding.decode import Batch, TrainedModel, translations
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.testsets import Portion
from m4.experiment import Experiment
from m4.jobs import command, streams
from m4.jobs.corpus import open_corpus, test_sets
from m4.jobs.decoding.testsets import trained_step
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.parallel.mesh import Layout, make_mesh
from m4.progress import ProgressBar
from m4.settings import InputError

# Rows per batch, and whether the sentences are shuffled; others are compared with the first. Over
# a mesh, the rows are rounded up so that they divide over it.
WAYS = ((1, False), (8, False), (64, False), (64, True), (256, False), (256, True))


def check(experiment: Experiment, portion: Portion, step: int | None = None) -> int:
    """Prints how many tokens of translations change, by direction; returns their number.

    The mesh is the experiment's or, if that has one device, all devices, with experts over as many
    as divide them.

    Raises:
        InputError: There are several processes, or no checkpoint, or no such direction.
    """
    if distributed.is_distributed():
        raise InputError("one process alone compares one device with several")
    folder = experiment.folder
    found = trained_step(folder, step)
    cache = open_corpus(experiment, test_sets)
    parts = build(experiment, cache)
    model = parts.model
    layouts: list[Layout | None] = [None]
    if jax.device_count() > 1:
        layouts.append(parts.layout() or _every_device(model))
    else:
        print(
            "one device is here: nothing is compared with a mesh (JAX_NUM_CPU_DEVICES=8 makes "
            "eight of a CPU)",
            file=sys.stderr,
        )
    pairs = portion.pairs(cache)
    directions = [direction for direction, each in pairs.items() for _ in each]
    texts = [tag(source, split_direction(direction)[1])
             for direction, each in pairs.items() for source, _ in each]  # fmt: skip
    ways: dict[str, list[list[int]]] = {}
    with ProgressBar("batch invariance", len(layouts) * len(WAYS), "ways") as bar:
        for layout in layouts:
            checkpoints = folder / "checkpoints"
            params, _, _ = restore_params(model, checkpoints, found, cache.vocabulary, layout)
            place = "1 device" if layout is None else f"{layout.mesh.size} devices"
            for rows, shuffled in WAYS:
                name = f"{place}, {rows} rows" + (", shuffled" if shuffled else "")
                settings = replace(experiment.decoding, batch_rows=rows)
                trained = TrainedModel(model, params, cache.vocabulary, settings, layout)
                numbers = [cache.directions.index(each) for each in directions]
                ways[name] = translated(trained, texts, shuffled, numbers)
                bar.update(len(ways))
    return _show(directions, ways, found)


def _every_device(model: Transformer) -> Layout:
    """Returns a layout over all devices, if the config's mesh has one device."""
    experts = 1 if model.moe is None else model.moe().num_experts
    return Layout(make_mesh(expert=math.gcd(jax.device_count(), experts)))


def translated(
    trained: TrainedModel,
    texts: Sequence[str],
    shuffled: bool = False,
    directions: Sequence[int] | None = None,
) -> list[list[int]]:
    """Returns the tokens of each text's translation, with EOS, in the order of the texts.

    `directions` are those of `translations`.
    """
    order = list(range(len(texts)))
    if shuffled:
        random.Random(0).shuffle(order)
    found: list[list[int]] = [[] for _ in texts]

    def keep(batch: Batch, best_BT: np.ndarray) -> None:
        for b, row in enumerate(batch.rows):
            found[order[row]] = [int(token) for token in best_BT[b] if token]

    translations(
        trained, [texts[i] for i in order], on_cut=lambda *_: None, on_batch=keep,
        directions=None if directions is None else [directions[i] for i in order],
    )  # fmt: skip
    return found


def changed(before: Sequence[int], after: Sequence[int]) -> int:
    """Returns the number of tokens that differ, are missing or are added."""
    differ = sum(a != b for a, b in zip(before, after, strict=False))
    return differ + abs(len(before) - len(after))


def _show(directions: Sequence[str], ways: dict[str, list[list[int]]], step: int) -> int:
    first, *others = ways
    table = Table(
        "direction", "sentences", "tokens", *others, title_justify="left", box=SIMPLE_HEAD,
        title=f"step {step}: tokens that differ from those of {first}",
    )  # fmt: skip
    every = 0
    for direction in dict.fromkeys(directions):
        mine = [i for i, name in enumerate(directions) if name == direction]
        counts = [sum(changed(ways[first][i], ways[way][i]) for i in mine) for way in others]
        tokens = sum(len(ways[first][i]) for i in mine)
        table.add_row(direction, str(len(mine)), str(tokens), *map(str, counts))
        every += sum(counts)
    streams.console().print(table)
    print(f"{every:,} of {sum(map(len, ways[first])) * len(others):,} tokens changed")
    return every


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    command.add_config(parser)
    command.add_flags(parser, "split", "step", "directions")
    command.add_flags(parser, "sentences", help="sentences per direction (default: 12)")
    arguments = parser.parse_args()
    sentences, directions = command.portion_of(arguments)
    portion = Portion(arguments.split or "test", sentences or 12, directions)
    with command.opened(arguments) as run:
        return 1 if check(run.experiment, portion, arguments.step) else 0


if __name__ == "__main__":
    sys.exit(main())
