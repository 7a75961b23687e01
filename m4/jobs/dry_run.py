"""`m4 JOB --dry_run`: the config is checked, all shapes are made, and nothing is written.

No corpus is built and no program is compiled; a vocabulary has the size that the config asks for.
"""

import argparse
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.table import Table

from m4.eval.decoding.decode import target_limit
from m4.experiment import Experiment
from m4.jobs import command, streams
from m4.jobs.bilingual.baselines import check_baselines
from m4.jobs.checkpoints.initial import check_start
from m4.jobs.open_run import located
from m4.model.layers import shapes_only
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.plan import memory
from m4.plan.program import planned, train_program
from m4.settings import InputError, pasted

_TRAINS = ("train", "baselines", "demo")
_MIB = 2**20


def dry_run(arguments: argparse.Namespace) -> None:
    """Prints the sizes of what a command trains or decodes with."""
    if getattr(arguments, "processes", None) is not None:
        plan = pasted("plan")
        raise InputError(f"--dry_run: one process checks a config; `{plan}` compiles it for many")
    with command.experiment_of(arguments) as (experiment, _):
        _sizes(experiment, arguments.command)


def _sizes(experiment: Experiment, job: str) -> None:
    distributed.check_joined()
    experiment = located(experiment)
    languages = len(experiment.data.corpus.language_pairs())
    console = streams.console()
    if job in _TRAINS and job != "baselines":
        console.print(_training(experiment, languages))
    if job not in _TRAINS or job == "demo":
        console.print(_decoding(experiment, languages))
    if job in ("baselines", "demo"):
        _check_baselines(experiment, console)
    console.print(f"{job}: the config is right; nothing was computed or written")


def _training(experiment: Experiment, languages: int) -> Table:
    training = experiment.training
    check_start(experiment, writes=False)
    program = train_program(experiment, jax.devices(), languages)
    held = memory.given(program.parts.model, program.params, program.optimizer)
    gradients = sum(map(memory.shard_bytes, jax.tree.leaves(program.params)))
    table = _table("training", program.params, held, {"gradients": gradients})
    rows = f"{program.rows:,} rows of {program.source_length} + {program.target_length} pieces"
    table.add_row("a batch", rows)
    table.add_row("steps", f"{training.total_steps:,}")
    table.add_row("directions", f"{len(program.parts.directions.names):,}")
    axes = [f"{name} {size}" for name, size in training.mesh().shape.items() if size > 1]
    table.add_row("mesh", ", ".join(axes) or "one device")
    table.caption = "without activations, for which the command plan compiles"
    return table


def _decoding(experiment: Experiment, languages: int) -> Table:
    parts = planned(experiment, languages)
    model, layout = parts.model, parts.layout()
    settings = experiment.decoding
    rows = settings.batch_rows if layout is None else layout.rows(settings.batch_rows)
    longest = target_limit(settings.max_source_length, settings.max_target_length)
    params = parts.placed_params()
    cache = _cache_bytes(model, rows * settings.beams, settings.max_source_length, longest)
    held = memory.given(model, params, None)
    del held["optimizer state"]
    table = _table("decoding", params, held, {"cache, over all devices": cache})
    table.add_row("a batch", f"{rows:,} sentences, {settings.beams} beams")
    table.add_row("lengths", f"{settings.max_source_length} and {longest} pieces")
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


def _check_baselines(experiment: Experiment, console: Any) -> None:
    levels = experiment.baselines
    if levels is None:
        raise InputError("experiment.Baselines: the config has none")
    check_baselines(levels)
    for name in ("high", "medium", "low"):
        one = levels.of(name)
        model = planned(one, 1).model
        total = sum(x.size for x in jax.tree.leaves(abstract_variables(model)["params"]))
        steps = one.training.total_steps
        console.print(f"bilingual, {name}: {total:,} parameters, {steps:,} steps at most")


def _table(title: str, params: Any, held: dict[str, int], more: dict[str, int]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    counts = memory.counts(params)
    for kind, count in counts.items():
        table.add_row(f"parameters: {kind}", f"{count:,}")
    table.add_row("parameters", f"{sum(counts.values()):,}")
    for kind, size in {**held, **more}.items():
        table.add_row(f"memory of a device: {kind}", f"{size / _MIB:,.2f} MiB")
    table.add_row("memory of a device", f"{sum([*held.values(), *more.values()]) / _MIB:,.2f} MiB")
    return table
