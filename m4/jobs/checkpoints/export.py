"""`m4 export`: a run's model as a checkpoint of T5X, or in Hugging Face's layout."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from flax.traverse_util import unflatten_dict

from m4.data.vocabulary.vocabulary import with_plain_tags
from m4.jobs.checkpoints.checkpoint import opened, step_of, store_of
from m4.jobs.checkpoints.pretrained import check_new, write_config
from m4.jobs.checkpoints.source_run import SourceRun
from m4.settings import InputError
from m4.storage import manifest, run_folder, safetensors, t5x
from m4.storage.files import whole_folder
from m4.storage.numbers import check_weights
from m4.storage.steps import used_item
from m4.train import hf_layout, t5x_layout
from m4.train.initial import InitialModel, unscanned

_MOMENTS = re.compile(r"((?:.+/)?)moments/(.+?)(?:/(rows|columns))?")


def export_hf(run: str, step: int | None, output: Path) -> str:
    """Writes a folder that Hugging Face's code of T5 loads; returns what is to be said of it.

    The parameters are those that the step is used with. A dense model is a T5 1.1 (with a table of
    relative positions in each layer a umT5), one with the gate `switch` a Switch Transformer.
    """
    folder, found = _checked(run, step, output)
    there = SourceRun(folder, run, InitialModel(run), found, None)
    try:
        config = hf_layout.config_of(there.model)
    except InputError as error:
        raise InputError(f"{run}: {error}") from error
    with store_of(folder) as store:
        params = store.read(found, used_item(manifest.items_of(store.folder / str(found))))
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
    """Writes OUTPUT/checkpoint_<steps> and the vocabulary; returns what is to be said of it.

    The parameters are those that the step is used with. Where they are the plain ones and the
    optimizer is Adafactor, its moments go with them.
    """
    folder, found = _checked(run, step, output)
    with store_of(folder) as store:
        items = manifest.items_of(store.folder / str(found))
        item = used_item(items)
        params = store.read(found, item)
        whole = item == "params" and "optimizer" in items
        state = store.read(found, "optimizer") if whole else {}
    check_weights(f"{folder}, step {found}", params)
    count, moments = _adafactor(state)
    steps = found if count is None else count
    arrays = {t5x_layout.TARGET + path: array for path, array in params.items()}
    if count is not None:
        arrays |= dict(_states(params, moments))
    with whole_folder(output) as unfinished:
        for path in (folder / run_folder.VOCABULARY).glob("vocabulary.*model"):
            shutil.copyfile(path, unfinished / path.name)
        t5x.write(unfinished, steps, arrays)
    said = "with Adafactor's state"
    if count is None:
        why = "its optimizer is no Adafactor" if whole else f"the {item} parameters have none"
        said = f"without an optimizer's state ({why}): in T5X set fallback_to_scratch = True"
    return f"{folder}, step {found} -> {output / f'checkpoint_{steps}'}, {said}"


def _checked(run: str, step: int | None, output: Path) -> tuple[Path, int]:
    """Returns a run's folder on this machine, and the step to export."""
    folder = opened(run)
    check_new(output)
    return folder, step_of(run, folder, step, used=True)


def _adafactor(
    state: Mapping[str, np.ndarray],
) -> tuple[int | None, dict[str, dict[str, np.ndarray]]]:
    """(steps, moments of each parameter) of an optimizer's state; None: it is no Adafactor."""
    moments: dict[str, dict[str, np.ndarray]] = {}
    count = None
    for path, array in state.items():
        if (match := _MOMENTS.fullmatch(path)) is not None:
            moments.setdefault(match[2], {})[match[3] or ""] = array
            count = int(state[f"{match[1]}count"])
    return count, moments


def _states(
    params: Mapping[str, np.ndarray], moments: Mapping[str, dict[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    for path, array in params.items():
        stacked = re.match(r"\w+_blocks/", path) is not None
        made = t5x_layout.t5x_moments(path, array.shape, moments[path], stacked)
        for name, value in made.items():
            yield f"{t5x_layout.STATES}{path}/{name}", value
