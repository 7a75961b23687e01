"""`m4 explain`: which pairs made a step's numbers bad. It reads, and holds no lock.

A batch is a function of the step, so the folder has all of it: config, corpus, checkpoints.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

from m4.data.cache.cache import Cache
from m4.data.cache.identity import shown
from m4.data.preprocess import language_of
from m4.data.samplers.learned import Learned
from m4.data.stream.stream import StepPair, Stream
from m4.experiment import Experiment
from m4.jobs import corpus, prepare
from m4.jobs.checkpoints.chapters import Standing, Turn, read_note
from m4.jobs.checkpoints.initial import beginning
from m4.jobs.train import learned_sampling
from m4.settings import InputError
from m4.storage import chapters, remote
from m4.storage.checkpoints import Checkpoints
from m4.storage.files import keep_result
from m4.storage.steps import complete_steps, is_removed, whole_step
from m4.train.early_stopping import EarlyStopper
from m4.train.loop.guard import read_bad_steps
from m4.train.loop.replay import replay, step_metrics
from m4.train.loop.resume import check_same, restore
from m4.train.measuring.per_pair import PairProbe, worst
from m4.train.state import TrainState
from m4.train.trainer import Trainer

_SHOWN = 20  # pairs in the table
_TEXT = 60  # characters of a sentence there


class _Folder(NamedTuple):
    """A run opened for reading, in the chapter of the step: its number, the step that it began
    after, and the position of the stream there; notes: of all checkpoints, by step."""

    path: Path
    chapter: int
    begun: int
    start: Mapping[str, Any] | None
    notes: Mapping[int, Mapping[str, Any]]
    cache: Cache
    stream: Stream
    trainer: Trainer


def chosen_step(experiment: Experiment, step: int | None) -> int:
    """The step to explain, None: the last bad one. InputError: there is none, or no such step."""
    folder = prepare.run_folder(experiment)
    if step is None:
        bad = read_bad_steps(folder)
        if not bad:
            raise InputError(f"{remote.shown(folder)}: no bad step is known there; give --step")
        step = max(int(record["step"]) for record in bad)
    if not 1 <= step <= experiment.training.total_steps:
        allowed = f"from 1 to {experiment.training.total_steps} (TRAIN_STEPS)"
        raise InputError(f"--step={step}: must be {allowed}")
    return step


def explain(
    experiment: Experiment,
    step: int,
    *,
    pairs: int = 64,
    exact: bool = False,
    output: Path | None = None,
) -> dict[str, Any]:
    """Ranks the pairs of a step's batch by loss and by gradient norm; returns what it found.

    Args:
        experiment: of the step's chapter. step: `chosen_step`.
        pairs: gradients are those of so many pairs, of the highest loss.
        exact: takes the steps since the checkpoint again; else its parameters are used as they are.
        output: the file to write; None: explain.<step>.json in the folder, if it can be written.

    Raises:
        ValueError: a corpus or checkpoint that is not the run's, or is not there any more.
    """
    folder = prepare.run_folder(experiment)
    bad: dict[int, str] = {record["step"]: record["what"] for record in read_bad_steps(folder)}
    run = _opened(experiment, folder, step)
    state, at = _state_before(experiment, run, step, exact)
    params = jax.device_get(state.params)
    # The step takes the state's memory.
    numbers = step_metrics(run.trainer.program, run.stream, state, step)
    found, rows = run.stream.pairs(step - 1)
    tokens = int(rows["decoder_loss_weights"].sum())
    probe = PairProbe(run.trainer.model, params, run.trainer.training, tokens)
    ranked = _ranked(probe, rows, pairs)
    _name(run.cache, found, ranked)
    about = {
        "step": step,
        "was": bad.get(step),
        "parameters_of_step": at,
        "replayed": exact,
        "step_metrics": _json(numbers),
        "pairs_in_batch": len(found),
        "pairs": [_json(row) for row in ranked],
    }
    _show(about, ranked)
    content = json.dumps(about, indent=1, ensure_ascii=False).encode()
    keep_result(content, output, folder / f"explain.{step}.json")
    return about


def _opened(experiment: Experiment, folder: Path, step: int) -> _Folder:
    number = chapters.at(folder, step)
    begun = next(one["step"] for one in chapters.of_run(folder) if one["chapter"] == number)
    notes = _notes(folder)
    start = _start(number, begun, notes, step)
    cache = _corpus(experiment, folder, number, step)
    mesh = prepare.check_sizes(experiment)
    stream = prepare.training_stream(experiment, cache, start)
    model = prepare.model_for(experiment, cache)
    trainer = prepare.trainer_of(experiment, model, stream.directions, mesh, stream.shapes, cache)
    return _Folder(folder, number, begun, start, notes, cache, stream, trainer)


def _notes(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Of all checkpoints; training may remove some meanwhile."""
    checkpoints, found = folder / "checkpoints", {}
    for step in complete_steps(checkpoints):
        try:
            found[step] = read_note(folder, step)
        except InputError:
            if not is_removed(checkpoints, step, seconds=1.0):
                raise
    return found


def _start(
    number: int, begun: int, notes: Mapping[int, Mapping[str, Any]], step: int
) -> Mapping[str, Any] | None:
    """The position at which a chapter's stream began; None: the first chapter's."""
    if number == 1:
        return None
    within = [note for note in notes.values() if note.get("chapter", 1) == number]
    if within:
        return within[0]["chapter_start"]
    if begun not in notes:
        raise InputError(
            f"--step={step}: no checkpoint of chapter {number} is left that records where its "
            "stream began (Training.keep_checkpoints)"
        )
    return notes[begun]["position"]


def _corpus(experiment: Experiment, folder: Path, number: int, step: int) -> Cache:
    """The corpus of the step's chapter."""
    address = corpus.place_of(experiment)
    place = corpus.fetched(address, corpus.everything)
    left = chapters.vocabulary(folder, step)
    there = (place / "manifest.json").is_file()
    if left is None or (there and Cache(place).fingerprint == Cache(left).fingerprint):
        cache = Cache(place, experiment.data.corpus.mixture)
        cache.verify()
        return cache
    known = chapters.of_run(folder)
    grown = next(one for one in known if one["chapter"] > number and one["text"])
    raise InputError(
        f"--step={step}: the corpus of chapter {number} is gone: {address} was built again for "
        f"chapter {grown['chapter']} ({shown(grown['text'])})"
    )


def _state_before(
    experiment: Experiment, run: _Folder, step: int, exact: bool
) -> tuple[TrainState, int]:
    """The state before a step, and how many steps its parameters have seen: one fewer than `step`
    where steps are replayed."""
    checkpoints = run.path / "checkpoints"
    before = max((one for one in run.notes if one < step), default=0)
    if exact and before < run.begun:
        raise InputError(f"--replay: {checkpoints}/{run.begun}, where the chapter began, is gone")
    program, saved = run.trainer.program, run.notes.get(before, {})
    _begin_phases(experiment, run, step)
    if before:
        whole_step(checkpoints, before)  # InputError: it is damaged
    if not before:
        begun = beginning(experiment, run.trainer.model, run.cache)  # run.json stays as it is
        state = program.new_state() if begun is None else begun.state(program)
    elif saved.get("chapter", 1) != run.chapter:
        at = Standing(run.chapter, True, saved, run.start)
        turn = Turn(experiment, run.path, at, run.cache, run.trainer.groups)
        state, _ = turn.taken_over(program)
    else:
        about = {"stream": run.stream.fingerprint(), "vocabulary": run.cache.vocabulary.fingerprint}
        check_same(f"{checkpoints}/{before}", saved, about)
        with contextlib.closing(Checkpoints(checkpoints, read_only=True)) as store:
            fresh, stopper = program.new_state(), EarlyStopper(None)
            state = restore(store, before, saved, fresh, stopper, saved)
    if exact:
        training = run.trainer.training
        state = replay(training, program, run.stream, run.path, saved, state, step)
    return state, int(state.step)


def _begin_phases(experiment: Experiment, run: _Folder, step: int) -> None:
    """The rates that were learned until the step: of the first checkpoint from it on, else of the
    chapter's last one or its beginning, if nothing was learned since."""
    if not isinstance(experiment.data.sampler, Learned):
        return
    sampling = learned_sampling(experiment, run.cache, run.stream)
    assert sampling is not None
    own = {one: note for one, note in run.notes.items() if note.get("chapter", 1) == run.chapter}
    of = min((one for one in own if one >= step - 1), default=max(own, default=run.begun))
    period = experiment.training.dev_period
    if of < step - 1 and (step - 1) // period > of // period:
        raise InputError(
            f"--step={step}: its batch is not known; rates were learned at step "
            f"{(step - 1) // period * period}, and the last checkpoint is of step {of}"
        )
    if of in own or run.chapter == 1:
        sampling.resume(own.get(of, {}).get("sampling"))
    else:
        sampling.begin(run.begun, run.notes[run.begun].get("sampling"))


def _ranked(probe: PairProbe, rows: Mapping[str, np.ndarray], pairs: int) -> list[dict[str, Any]]:
    """The pairs by gradient norm, those that have none by loss; what is not finite first."""
    losses = probe.losses(rows)
    by_loss = sorted(range(len(losses)), key=lambda i: -_height(losses[i]))
    found = []
    for rank, pair in enumerate(by_loss, 1):
        row = {"pair": pair, "loss": float(losses[pair]), "loss_rank": rank}
        if rank <= pairs:
            row["gradient_norm"] = probe.gradient_norm(rows, pair)
            layers = probe.extremes(rows, pair)
            row |= {f"worst_{k}": v for k, v in worst(layers)._asdict().items()}
            experts = [one for one in layers if one.expert is not None]
            if experts:  # of the worst layer with experts
                row["worst_moe"], row["worst_expert"] = (of := worst(experts)).layer, of.expert
        found.append(row)
    found.sort(key=lambda row: (-_height(row.get("gradient_norm", -1.0)), row["loss_rank"]))
    for rank, row in enumerate(found, 1):
        if "gradient_norm" in row:
            row["gradient_rank"] = rank
    return found


def _height(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _name(cache: Cache, found: Sequence[StepPair], ranked: Sequence[dict[str, Any]]) -> None:
    """Adds direction, file, line and text of each pair."""
    wanted: dict[str, set[int]] = {}
    for pair in found:
        wanted.setdefault(language_of(pair.direction), set()).add(pair.index)
    texts = {code: _texts(cache, code, indices) for code, indices in wanted.items()}
    origins = {code: cache.origins(code, "train") for code in wanted}
    for row in ranked:
        pair = found[row.pop("pair")]
        code = language_of(pair.direction)
        if (known := origins[code]) is not None:
            file, line = known[pair.index]
        else:
            file, line = cache.text_file(code, "train").name, pair.index + 1
        english, translation = texts[code][pair.index]
        row |= {"direction": pair.direction, "language": code, "file": file, "line": line}
        row |= {"row": pair.row, "english": english, "translation": translation}


def _texts(cache: Cache, code: str, indices: set[int]) -> dict[int, tuple[str, str]]:
    pairs = enumerate(islice(cache.pairs(code, "train"), max(indices) + 1))
    return {index: (pair.english, pair.translation) for index, pair in pairs if index in indices}


def _json(row: Mapping[str, Any]) -> dict[str, Any]:
    """NaN and infinity as text: JSON has neither."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _show(about: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]]) -> None:
    console = prepare.console()
    step, numbers = about["step"], about["step_metrics"]
    at = about["parameters_of_step"]
    print(f"step {step}{': ' + about['was'] if about['was'] else ''}")
    exact = "those before it" if at == step - 1 else f"those after step {at} (--replay: exactly)"
    print(
        f"with the parameters of step {at}, {exact}: loss {_short(numbers['loss'])}, gradient norm "
        f"{_short(numbers['gradient_norm'])}, {about['pairs_in_batch']} pairs"
    )
    table = Table("|g|", "loss", "direction", "file:line", "layer", "expert", "English", "other")
    for row in ranked[:_SHOWN]:
        broken = f" ({row['worst_not_finite']:,} not finite)" if row.get("worst_not_finite") else ""
        expert = f"{row['worst_moe']}: {row['worst_expert']}" if "worst_moe" in row else ""
        table.add_row(
            _short(row.get("gradient_norm", "")), _short(row["loss"]), row["direction"],
            f"{row['file']}:{row['line']}", f"{row.get('worst_layer', '')}{broken}", expert,
            row["english"][:_TEXT], row["translation"][:_TEXT],
        )  # fmt: skip
    console.print(table)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
