"""`m4 JOB --dry_run`: checks the config and all shapes, and writes nothing.

No corpus is built and no program compiled; vocabularies have the sizes that the config asks for.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.table import Table

from m4.eval.decoding.decode import target_limit
from m4.eval.scoring.levels import LEVELS
from m4.experiment import Experiment
from m4.jobs import command, streams
from m4.jobs.bilingual import baselines_of, check_baselines
from m4.jobs.checkpoints.initial import check_start
from m4.jobs.open_run import located
from m4.model.layers import shapes_only
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.plan.program import given_bytes, parameter_counts, planned, shard_bytes, train_program
from m4.settings import InputError, pasted

_MIB = 2**20


def dry_run(arguments: argparse.Namespace) -> None:
    """Prints the sizes of the model, batch, state and caches of a command."""
    if getattr(arguments, "processes", None) is not None:
        plan = pasted("plan")
        raise InputError(f"--dry_run: one process checks a config; `{plan}` compiles it for many")
    with command.experiment_of(arguments) as (given, _):
        distributed.check_joined()
        experiment, job, console = located(given), arguments.command, streams.console()
        languages = len(experiment.data.corpus.language_pairs())
        if job in ("train", "demo"):
            console.print(_training(experiment, languages))
        if job not in ("train", "baselines"):
            console.print(_decoding(experiment, languages))
        for line in _baselines(experiment) if job in ("baselines", "demo") else ():
            console.print(line)
        console.print(f"{job}: the config is right; nothing was computed or written")


def _training(experiment: Experiment, languages: int) -> Table:
    training = experiment.training
    check_start(experiment, writes=False)
    program = train_program(experiment, jax.devices(), languages)
    held = given_bytes(program.params, program.optimizer)
    held["gradients"] = sum(map(shard_bytes, jax.tree.leaves(program.params)))
    table = _table("training", program.params, held)
    rows = f"{program.rows:,} rows of {program.source_length} + {program.target_length} pieces"
    table.add_row("a batch", rows)
    table.add_row("steps", f"{training.total_steps:,}")
    table.add_row("directions", f"{len(program.parts.directions.names):,}")
    axes = [f"{name} {size}" for name, size in training.mesh().shape.items() if size > 1]
    table.add_row("mesh", ", ".join(axes) or "one device")
    table.caption = "without activations, for which the command plan compiles"
    return table


def _decoding(experiment: Experiment, languages: int) -> Table:
    parts, settings = planned(experiment, languages), experiment.decoding
    layout, params = parts.layout(), parts.placed_params()
    rows = settings.batch_rows if layout is None else layout.rows(settings.batch_rows)
    source_length = settings.max_source_length
    lengths = source_length, target_limit(source_length, settings)
    held = given_bytes(params, None)
    del held["optimizer state"]
    held["cache, over all devices"] = _cache_bytes(parts.model, rows * settings.beams, *lengths)
    table = _table("decoding", params, held)
    table.add_row("a batch", f"{rows:,} sentences, {settings.beams} beams")
    table.add_row("lengths", f"{lengths[0]} and {lengths[1]} pieces")
    return table


def _cache_bytes(model: Transformer, rows: int, source: int, target: int) -> int:
    """Returns the bytes of keys and values of `rows` hypotheses."""

    def run(params: Any, encoder: Any, decoder: Any) -> Any:
        _, made = model.apply(
            {"params": params}, encoder, decoder, decoder, decode=True, enable_dropout=False,
            encoder_direction_ids=encoder, decoder_direction_ids=decoder, mutable=["cache"],
        )  # fmt: skip
        return made["cache"]

    tokens = [jax.ShapeDtypeStruct((rows, length), "int32") for length in (source, target)]
    with shapes_only():
        cache = jax.eval_shape(run, abstract_variables(model)["params"], *tokens)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def _baselines(experiment: Experiment) -> Iterator[str]:
    check_baselines(experiment)
    for name in LEVELS:
        one = baselines_of(experiment).of(name)
        params = abstract_variables(planned(one, 1).model)["params"]
        total, steps = sum(x.size for x in jax.tree.leaves(params)), one.training.total_steps
        yield f"bilingual, {name}: {total:,} parameters, {steps:,} steps at most"


def _table(title: str, params: Any, held: dict[str, int]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    counts = parameter_counts(params)
    for kind, count in counts.items():
        table.add_row(f"parameters: {kind}", f"{count:,}")
    table.add_row("parameters", f"{sum(counts.values()):,}")
    for kind, size in {**{f": {kind}": size for kind, size in held.items()},
                       "": sum(held.values())}.items():  # fmt: skip
        table.add_row(f"memory of a device{kind}", f"{size / _MIB:,.2f} MiB")
    return table
