"""`m4 data batch`: the sentence pairs of a training step."""

from __future__ import annotations

import argparse
from itertools import islice
from typing import TYPE_CHECKING

from m4.jobs import command
from m4.settings import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from m4.build import Parts

EXAMPLE = "m4 data batch runs/demo --step=100"
_COLUMNS = ["row", "direction", "source_pieces", "target_pieces", "file", "line", "first", "second"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    parser.add_argument("--step", type=int, required=True, help="training step, from 1")


def run(arguments: argparse.Namespace) -> None:
    """Prints the pairs that training draws in a step, one per line, in columns separated by tabs.

    A batch is a function of the step, so neither a checkpoint nor a model is needed. Rates of a
    sampler that learns are those of the latest checkpoint.
    """
    with command.opened(arguments, "data", computes=False) as run:
        from m4.build import build
        from m4.data.directions import key_of, pair_of
        from m4.jobs.corpus import open_corpus

        experiment, step = run.experiment, arguments.step
        if not 1 <= step <= experiment.training.total_steps:
            allowed = f"from 1 to {experiment.training.total_steps} (TRAIN_STEPS)"
            raise InputError(f"--step={step}: must be {allowed}")
        cache = open_corpus(experiment)
        parts = build(experiment, cache)
        _take_learned_rates(parts, run.folder, step)
        pairs, rows = parts.stream.pairs(step - 1)
        names = "encoder_input_tokens", "decoder_target_tokens"
        lengths = [(rows[name] > 0).sum(axis=1) for name in names]
        wanted: dict[str, set[int]] = {}
        for pair in pairs:
            wanted.setdefault(pair_of(pair.direction), set()).add(pair.index)
        texts: dict[str, dict[int, tuple[str, str]]] = {}
        for name, indices in wanted.items():
            given = enumerate(islice(cache.pairs(name, "train"), max(indices) + 1))
            texts[name] = {i: (pair.first, pair.second) for i, pair in given if i in indices}
        origins = {pair: cache.origins(pair, "train") for pair in wanted}
        print(*_COLUMNS, sep="\t")
        drawn = zip(pairs, *lengths, strict=True)
        for pair, *pieces in sorted(drawn, key=lambda one: (one[0].row, one[0].direction)):
            code = pair_of(pair.direction)
            place = (f"train.{key_of(code)}", pair.index + 1)
            if (known := origins[code]) is not None:
                place = known[pair.index]
            print(pair.row, pair.direction, *pieces, *place, *texts[code][pair.index], sep="\t")


def _take_learned_rates(parts: Parts, folder: Path, step: int) -> None:
    """Gives the stream the rates that a learned sampler had at the latest checkpoint."""
    from m4.storage.checkpoints import read_note
    from m4.storage.steps import latest_step

    if (sampling := parts.sampling()) is None:
        return
    period = parts.experiment.training.dev_period
    latest = latest_step(folder / "checkpoints") or 0
    if (step - 1) // period > latest // period:
        why = f"the sampler learns its rates and the latest checkpoint is of step {latest}"
        raise InputError(f"--step={step}: its batch is not known, because {why}")
    sampling.resume(read_note(folder, latest).get("sampling") if latest else None)
