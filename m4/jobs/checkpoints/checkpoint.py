"""`m4 checkpoint list|verify|inspect|convert`: the checkpoints of a run, looked at and exported.

They read, and hold no lock; only `convert` writes, and elsewhere.
"""

import contextlib
import datetime
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m4.jobs.checkpoints.pretrained import check_new
from m4.settings import InputError
from m4.storage import manifest, run_folder, safetensors
from m4.storage.checkpoints import Checkpoints
from m4.storage.files import whole_folder
from m4.storage.local_copy import fetched
from m4.storage.numbers import check_weights
from m4.storage.steps import complete_steps, damaged_steps, used_item, whole_step

# Characters of an entry of a note: counts by direction, layer and expert may be megabytes.
_LONG = 200


def checkpoint(
    what: str,
    run: str,
    step: int | None,
    console: Console,
    output: Path | None = None,
    dtype: str | None = None,
    weights: Path | None = None,
) -> bool:
    """Looks at checkpoints, or converts one; returns whether all that was looked at is whole."""
    folder = opened(run)
    if what in ("list", "verify"):
        return _verify(folder, step, console, full=what == "verify")
    found = step_of(run, folder, step)
    if what == "inspect":
        return _inspect(folder, found, console)
    if output is None:
        raise InputError("--output: give FILE.safetensors, or a folder that becomes a run's")
    _convert(folder, found, output, dtype, weights)
    console.print(f"{folder}, step {found} -> {output}", soft_wrap=True)
    return True


def opened(run: str) -> Path:
    """Returns a run's folder on this machine, of which nothing is computed on an accelerator."""
    jax.config.update("jax_platforms", "cpu")  # a training job may have the accelerator
    folder = fetched(run)
    run_folder.read(folder)
    return folder


def step_of(run: str, folder: Path, step: int | None, *, used: bool = False) -> int:
    """Returns a whole step of a run. `used`: See `m4.storage.steps.whole_step`."""
    found = whole_step(folder / "checkpoints", step, used=used)
    if found is None:
        raise InputError(f"{run}: no checkpoints; train first, or give another run")
    return found


def store_of(folder: Path) -> contextlib.closing[Checkpoints]:
    """Returns the checkpoints of a folder, to read."""
    return contextlib.closing(Checkpoints(folder / "checkpoints", read_only=True))


def _verify(folder: Path, step: int | None, console: Console, *, full: bool) -> bool:
    steps = complete_steps(folder / "checkpoints")
    if not steps or (step is not None and step not in steps):
        wanted = "no checkpoints" if step is None else f"no checkpoint of step {step}"
        there = f"; there are {', '.join(map(str, steps))}" if steps else ""
        raise InputError(f"{folder}: {wanted}{there}")
    table = Table(box=SIMPLE_HEAD)
    for name in ("step", "saved", "MB", "items", "note", "SHA-256" if full else "sizes"):
        table.add_column(name, justify="right" if name in ("step", "MB") else "left")
    whole = True
    with store_of(folder) as store:
        for one in steps if step is None else [step]:
            there = store.folder / str(one)
            at = there.stat().mtime  # by the store's clock
            saved = datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M") if at else ""
            said = manifest.problem(there, level="full" if full else "fast")
            files = None if said else manifest.files_of(there)
            state = "as written" if files else "no manifest: not verified"
            whole = whole and said is None
            note = {} if said else store.note(one)
            items = set() if said else manifest.items_of(there) - {manifest.ITEM, "note"}
            table.add_row(
                str(one),
                saved,
                f"{sum(size for size, _ in (files or {}).values()) / 1e6:,.1f}" if files else "",
                ", ".join(sorted(items)),
                _noted(note),
                Text.assemble(("DAMAGED ", "bold"), said) if said else state,
            )
    console.print(table)
    for path in damaged_steps(folder / "checkpoints"):
        console.print(f"{path}: moved aside, damaged", highlight=False, soft_wrap=True)
    return whole


def _noted(note: Mapping[str, Any]) -> str:
    """Returns the entries of a note that a reader looks for."""
    names = ("best_step", "finished", "averaged", "converted")
    found = {name: note[name] for name in names if note.get(name) is not None}
    return ", ".join(
        f"{name} {' '.join(value) if isinstance(value, dict) else value}"
        for name, value in found.items()
    )


def _inspect(folder: Path, step: int, console: Console) -> bool:
    """Prints every array and what the note says, a line an entry."""
    finite = True
    with store_of(folder) as store:
        there = store.folder / str(step)
        for item in sorted(manifest.items_of(there) - {manifest.ITEM, "note", "metrics"}):
            table = Table(box=SIMPLE_HEAD, title=f"{there}/{item}", title_justify="left")
            for name in ("array", "shape", "dtype", "saved over", "norm", "not finite"):
                right = name in ("norm", "not finite")
                # A name whose end is cut off would be that of several arrays.
                table.add_column(name, justify="right" if right else "left", overflow="fold")
            known = store.arrays(step, item)
            for path, array in store.read(step, item).items():
                values = np.asarray(array, np.float64)
                wrong = int(values.size - np.isfinite(values).sum())
                finite = finite and not wrong
                table.add_row(
                    path,
                    "x".join(map(str, array.shape)) or "scalar",
                    str(array.dtype),
                    _sharding(known[path]),
                    f"{np.linalg.norm(values):.4g}",
                    Text(str(wrong), "bold" if wrong else ""),
                )
            console.print(table)
        for name, value in store.note(step).items():
            said = json.dumps(value, ensure_ascii=False, default=str)
            if len(said) > _LONG:
                said = f"{said[:_LONG]}... ({len(said):,} characters)"
            console.print(f"{name}: {said}", highlight=False, soft_wrap=True)
    return finite


def _sharding(known: Any) -> str:
    """The mesh axes that an array was split over when it was saved."""
    found = getattr(known, "sharding", None)
    axes = [axis for axis in getattr(found, "partition_spec", None) or () if axis is not None]
    return ", ".join(map(str, axes)) or "whole"


def _convert(
    folder: Path, step: int, output: Path, dtype: str | None, weights: Path | None
) -> None:
    """The parameters that a step is used with, as a file or as a separate run."""
    check_new(output)
    with store_of(folder) as store:
        item = used_item(manifest.items_of(store.folder / str(step)))
        note = {**store.note(step), "converted": dtype or "as it was"}
        params = store.read(step, item)
    if weights is not None:
        params = _same_shapes(safetensors.read(weights), params, weights)
        said = safetensors.about(weights).get("step", "")
        step = int(said) if said.isdecimal() else step
    if dtype is not None:
        kind = jnp.dtype(dtype)
        check_weights(weights or folder, params)
        with np.errstate(over="ignore"):  # infinite: refused below
            params = {path: array.astype(kind) for path, array in params.items()}
    check_weights(weights or folder, params)
    if output.suffix == ".safetensors":
        about = {"step": str(step), "item": item, "vocabulary": str(note.get("vocabulary"))}
        safetensors.write(output, params, about)
        return
    with whole_folder(output) as unfinished:
        for name in ("run.json", "config.gin", "operative_config.gin"):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, unfinished / name)
        shutil.copytree(folder / run_folder.VOCABULARY, unfinished / run_folder.VOCABULARY)
        with contextlib.closing(Checkpoints(unfinished / "checkpoints")) as store:
            store.save(
                step, {"params": jax.tree.map(jnp.asarray, unflatten_dict(params, sep="/"))}, note
            )


def _same_shapes(
    given: dict[str, np.ndarray], known: Mapping[str, np.ndarray], path: Path
) -> dict[str, np.ndarray]:
    """InputError: the file has other arrays than the run's model."""
    for name in sorted(given.keys() | known.keys()):
        here = given[name].shape if name in given else "missing"
        there = known[name].shape if name in known else "missing"
        if here != there:
            raise InputError(f"--weights={path}: {name} is {here} there and {there} in the run")
    return given
