"""`m4 checkpoint list|verify|inspect|convert` and `m4 export`: the checkpoints of a run.

These commands only read the run, so they hold no lock; `convert` and `export` write elsewhere.
"""

import datetime
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m4.data.vocabulary.vocabulary import with_plain_tags
from m4.jobs.checkpoints.initial import SourceRun
from m4.jobs.checkpoints.pretrained import check_new, write_config
from m4.settings import InputError
from m4.storage import run_folder, safetensors, steps, t5x
from m4.storage.checkpoints import Checkpoints, check_weights
from m4.storage.files import whole_folder
from m4.storage.local_copy import fetched
from m4.storage.steps import complete_steps, damaged_steps, items_of, used_item, whole_step
from m4.train import hf_layout, t5x_layout
from m4.train.initial import InitialModel, unscanned

# Shown characters of a note's entry: counts by direction, layer and expert may be megabytes.
_LONG = 200
# Entries of a note that `list` shows.
_NOTED = ("best_step", "finished", "averaged", "converted")
_MOMENTS = re.compile(r"((?:.+/)?)moments/(.+?)(?:/(rows|columns))?")


def opened(run: str) -> Path:
    """Returns a run's folder on this machine; from now on JAX computes on the CPU."""
    jax.config.update("jax_platforms", "cpu")  # a training job may have the accelerator
    folder = fetched(run)
    run_folder.read(folder)
    return folder


def step_of(run: str, folder: Path, step: int | None, *, used: bool = False) -> int:
    """Returns a complete step of a run. For `used`, see `m4.storage.steps.whole_step`."""
    found = whole_step(folder / "checkpoints", step, used=used)
    if found is None:
        raise InputError(f"{run}: no checkpoints; train first, or give another run")
    return found


def store_of(folder: Path) -> Checkpoints:
    """Opens the checkpoints of a folder for reading."""
    return Checkpoints(folder / "checkpoints", read_only=True)


def verify(run: str, step: int | None, console: Console, *, full: bool) -> bool:
    """Prints a line per step; returns whether all are complete. `full` compares SHA-256."""
    folder = opened(run)
    there_are = complete_steps(folder / "checkpoints")
    if not there_are or (step is not None and step not in there_are):
        wanted = "no checkpoints" if step is None else f"no checkpoint of step {step}"
        there = f"; there are {', '.join(map(str, there_are))}" if there_are else ""
        raise InputError(f"{folder}: {wanted}{there}")
    table = Table(box=SIMPLE_HEAD)
    for name in ("step", "saved", "MB", "items", "note", "SHA-256" if full else "sizes"):
        table.add_column(name, justify="right" if name in ("step", "MB") else "left")
    whole = True
    with store_of(folder) as store:
        for one in there_are if step is None else [step]:
            there = store.folder / str(one)
            at = there.stat().mtime  # time by the store's clock
            saved = datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M") if at else ""
            said = steps.problem(there, level="full" if full else "fast")
            files = None if said else steps.files_of(there)
            state = "as written" if files else "no manifest: not verified"
            whole = whole and said is None
            note = {} if said else store.note(one)
            items = set() if said else items_of(there) - {steps.ITEM, "note"}
            noted = {name: note[name] for name in _NOTED if note.get(name) is not None}
            table.add_row(
                str(one),
                saved,
                f"{sum(size for size, _ in (files or {}).values()) / 1e6:,.1f}" if files else "",
                ", ".join(sorted(items)),
                ", ".join(f"{name} {' '.join(value) if isinstance(value, dict) else value}"
                          for name, value in noted.items()),
                Text.assemble(("DAMAGED ", "bold"), said) if said else state,
            )  # fmt: skip
    console.print(table)
    for path in damaged_steps(folder / "checkpoints"):
        console.print(f"{path}: moved aside, damaged", highlight=False, soft_wrap=True)
    return whole


def inspect(run: str, step: int | None, console: Console) -> bool:
    """Prints every array and the note; returns whether all numbers are finite."""
    folder, finite = opened(run), True
    step = step_of(run, folder, step)
    with store_of(folder) as store:
        there = store.folder / str(step)
        for item in sorted(items_of(there) - {steps.ITEM, "note", "metrics"}):
            table = Table(box=SIMPLE_HEAD, title=f"{there}/{item}", title_justify="left")
            for name in ("array", "shape", "dtype", "saved over", "norm", "not finite"):
                right = name in ("norm", "not finite")
                # Names are never cut off, as several arrays' would then look the same.
                table.add_column(name, justify="right" if right else "left", overflow="fold")
            known = store.arrays(step, item)
            for path, array in store.read(step, item).items():
                values = np.asarray(array, np.float64)
                wrong = int(values.size - np.isfinite(values).sum())
                finite = finite and not wrong
                sharding = getattr(known[path], "sharding", None)  # the sharding when it was saved
                axes = [str(one) for one in getattr(sharding, "partition_spec", None) or () if one]
                table.add_row(
                    path, "x".join(map(str, array.shape)) or "scalar", str(array.dtype),
                    ", ".join(axes) or "whole", f"{np.linalg.norm(values):.4g}",
                    Text(str(wrong), "bold" if wrong else ""),
                )  # fmt: skip
            console.print(table)
        for name, value in store.note(step).items():
            said = json.dumps(value, ensure_ascii=False, default=str)
            if len(said) > _LONG:
                said = f"{said[:_LONG]}... ({len(said):,} characters)"
            console.print(f"{name}: {said}", highlight=False, soft_wrap=True)
    return finite


def convert(
    run: str, step: int | None, output: Path, dtype: str | None, weights: Path | None
) -> str:
    """Writes the parameters that a step translates with, as a file or as a separate run.

    Args:
        dtype: Type of the written parameters. Defaults to their own.
        weights: File of arrays to write instead of the run's.
    """
    folder = opened(run)
    step = found = step_of(run, folder, step)
    check_new(output)
    with store_of(folder) as store:
        item = store.used(step)
        note = {**store.note(step), "converted": dtype or "as it was"}
        params = store.read(step, item)
    if weights is not None:
        known, params = params, safetensors.read(weights)
        for name in sorted(params.keys() | known.keys()):
            here, there = (one[name].shape if name in one else "missing" for one in (params, known))
            if here != there:
                said = f"{name} is {here} there and {there} in the run"
                raise InputError(f"--weights={weights}: {said}")
        said = safetensors.about(weights).get("step", "")
        step = int(said) if said.isdecimal() else step
    if dtype is not None:
        check_weights(weights or folder, params)
        with np.errstate(over="ignore"):  # an overflow to infinity is refused below
            params = {path: array.astype(jnp.dtype(dtype)) for path, array in params.items()}
    check_weights(weights or folder, params)
    if output.suffix == ".safetensors":
        about = {"step": str(step), "item": item, "vocabulary": str(note.get("vocabulary"))}
        safetensors.write(output, params, about)
    else:
        with whole_folder(output) as unfinished:
            for name in ("run.json", "config.gin", "operative_config.gin"):
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, unfinished / name)
            shutil.copytree(folder / run_folder.VOCABULARY, unfinished / run_folder.VOCABULARY)
            tree = jax.tree.map(jnp.asarray, unflatten_dict(params, sep="/"))
            with Checkpoints(unfinished / "checkpoints") as store:
                store.save(step, {"params": tree}, note)
    return f"{folder}, step {found} -> {output}"


def export_hf(run: str, step: int | None, output: Path) -> str:
    """Writes a folder that Hugging Face's T5 code loads; returns a message about it.

    The parameters are those that the step translates with. A dense model becomes a T5 1.1 (or, with
    relative positions in each layer, a umT5), and one with the gate `switch` a Switch Transformer.
    """
    folder, found = _to_export(run, step, output)
    there = SourceRun(folder, run, InitialModel(run), found)
    try:
        config = hf_layout.config_of(there.model)
    except InputError as error:
        raise InputError(f"{run}: {error}") from error
    with store_of(folder) as store:
        params = store.read(found, store.used(found))
    check_weights(f"{run}, step {found}", params)
    read, arrays = unscanned(unflatten_dict(params, sep="/")), {}
    for path, shape in there.shapes.items():
        place = hf_layout.place(path, shape, there.model)
        assert place is not None, path
        arrays |= place.written(np.asarray(read(path)))
    with whole_folder(output) as unfinished:
        vocabulary = there.vocabulary("target")
        model = with_plain_tags(vocabulary.path.read_bytes())
        (unfinished / "spiece.model").write_bytes(model)
        write_config(unfinished, config, vocabulary)
        safetensors.write(unfinished / safetensors.SINGLE, arrays, {"format": "pt"})
    return f"{run}, step {found} -> {output}, {config['architectures'][0]}"


def export(run: str, step: int | None, output: Path) -> str:
    """Writes OUTPUT/checkpoint_<steps> and the vocabulary for T5X; returns a message about it.

    The parameters are those that the step translates with. If they are not averaged and the
    optimizer is Adafactor, its moments are written too.
    """
    folder, found = _to_export(run, step, output)
    with store_of(folder) as store:
        items = items_of(store.folder / str(found))
        item = used_item(items)
        params = store.read(found, item)
        whole = item == "params" and "optimizer" in items
        state = store.read(found, "optimizer") if whole else {}
    check_weights(f"{folder}, step {found}", params)
    count, moments = None, dict[str, dict[str, np.ndarray]]()  # None for other optimizers
    for path, array in state.items():
        if (match := _MOMENTS.fullmatch(path)) is not None:
            moments.setdefault(match[2], {})[match[3] or ""] = array
            count = int(state[f"{match[1]}count"])
    steps = found if count is None else count
    arrays = {t5x_layout.TARGET + path: array for path, array in params.items()}
    for path, array in params.items() if count is not None else ():
        stacked = re.match(r"\w+_blocks/", path) is not None
        made = t5x_layout.t5x_moments(path, array.shape, moments[path], stacked)
        arrays |= {f"{t5x_layout.STATES}{path}/{name}": value for name, value in made.items()}
    with whole_folder(output) as unfinished:
        for path in (folder / run_folder.VOCABULARY).glob("vocabulary.*model"):
            shutil.copyfile(path, unfinished / path.name)
        t5x.write(unfinished, steps, arrays)
    said = "with Adafactor's state"
    if count is None:
        why = "its optimizer is no Adafactor" if whole else f"the {item} parameters have none"
        said = f"without an optimizer's state ({why}): in T5X set fallback_to_scratch = True"
    return f"{folder}, step {found} -> {output / f'checkpoint_{steps}'}, {said}"


def _to_export(run: str, step: int | None, output: Path) -> tuple[Path, int]:
    """Returns a run's folder on this machine, and the step to export."""
    folder = opened(run)
    check_new(output)
    return folder, step_of(run, folder, step, used=True)
