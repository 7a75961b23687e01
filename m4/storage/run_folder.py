"""A run's folder (MODEL_DIR): its config, the files of jobs, and a record of its origin."""

import hashlib
import json
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from m4.parallel.platform.hardware import package_version
from m4.settings import InputError
from m4.storage.files import read_json, remove, undamaged, whole, write_text
from m4.storage.local_copy import address_of
from m4.storage.records import anything, count, entry, flag, listed, named, record, text

_PACKAGES = (
    *("m4", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "seqio", "sentencepiece"),
    *("babel", "sacrebleu", "numpy"),
)

# Folder with the parts of the corpus that the model needs: languages and vocabularies.
VOCABULARY = "vocabulary"
# Entries that jobs add to run.json: the run from which this one began, or of which it is a part.
_NOTES = ("initial", "extracted")

_TEXTS, _PAIRS = named(text), named(entry(text, text))
_INITIAL = {"run": text, "step": count, "optimizer?": flag}
_INITIAL |= {"changes?": _PAIRS, "kept?": listed(text)}
_RUN = record(
    {
        **{"config": _TEXTS, "modules?": _TEXTS, "versions?": _TEXTS, "mutable?": listed(text)},
        **{"machine?": text, "initial?": record(_INITIAL), "decoding?": named(anything)},
    }
)

# Setting -> [value before, now].
Changes = Mapping[str, list[str]]

# Kinds of files; jobs that write different kinds may work at the same time.
KINDS = ("train", "eval", "steps", "data", "baselines")
_KIND_OF = (
    (r"decodes/([^/]*=[^/]*/)?(\d+/|scores_by_step\.)|scores_by_step\.", "steps"),
    (
        r"decodes/|scores\.(\w+\.)?jsonl$|(deltas|rates|forgotten)\.jsonl$|delta_bleu\."
        r"|report\.html$|zero_shot/",
        "eval",
    ),
    (r"(data_preview|data_report|dropped)\.", "data"),
    (r"baselines/", "baselines"),
)

# Files that hold no work: another config may take over a folder that has only these.
CONFIG_FILES = ("run.json", "config.gin", "operative_config.gin")
_OWN = {*CONFIG_FILES, "compilation_cache", "data", VOCABULARY}
_OWN |= {"data_preview.json", "data_report.json", "data_report.html"}

# Everything that jobs write at the top of the folder (docs/run_folder.md), unlike a user's files.
_WRITTEN = re.compile(
    r"run\.json|(operative_)?config\.gin|heartbeat\.json|metrics\.jsonl|report\.html"
    r"|dropped\.jsonl\.gz|(data_preview|data_report|delta_bleu)\.\w+"
    r"|(scores|deltas|rates|scores_by_step|forgotten)(\.\w+)?\.(jsonl|png|svg)|atlas(\.\w+)?\.(json|png)"
    r"|vocabulary|checkpoints|tensorboard|stalls|profile|logs|decodes|baselines"
    r"|zero_shot|compilation_cache"
)


def kind_of(name: str) -> str:
    """Returns the kind of a file, by its name in a run's folder."""
    if match := re.match(r"compilation_cache/(\w+)/", name):
        return match[1]
    return next((kind for pattern, kind in _KIND_OF if re.match(pattern, name)), "train")


def has_work(folder: Path) -> bool:
    """Returns whether jobs have left more in the folder than a corpus and reports on it."""
    return not _names(folder) <= _OWN


def claim(
    folder: Path, settings: Mapping[str, str], mutable: Collection[str], modules: Mapping[str, str],
    texts: Mapping[str, str], decoding: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Claims the folder for a config, or checks that it belongs to it.

    Args:
        settings, mutable: Setting -> value as text, and names of settings that may change.
        modules: The user's modules that the config imports -> their folders.
        texts: Content of config.gin and operative_config.gin.
        decoding: Settings that decide the translations in decodes/, as JSON. Defaults to any.

    Raises:
        InputError: The folder belongs to another config, or is not a run's folder.
    """
    there = _names(folder)
    kept = _checked(folder) if there else {}
    if there - _OWN:
        check(folder, settings, mutable)
    elif kept and changed(kept, settings, mutable):
        kept = {}  # this config takes over another one's folder
    versions = {name: package_version(name) for name in _PACKAGES}
    versions["python"] = platform.python_version()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    about = {name: kept[name] for name in _NOTES if name in kept}
    about |= {"config": dict(settings), "mutable": sorted(mutable), "modules": dict(modules)}
    about |= {"decoding": dict(decoding or {}), "versions": versions}
    _write(folder, {**about, "machine": machine, "command": sys.argv})
    for name, content in texts.items():
        write_text(folder / name, content)


def _names(folder: Path) -> set[str]:
    """Returns the names in the folder that are not hidden."""
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    there = {name for name in there if not name.startswith(".")}
    return there | ({"checkpoints"} if address_of(folder / "checkpoints").exists() else set())


def _checked(folder: Path) -> dict[str, Any]:
    """Returns run.json of a folder that is not empty, or {} if it has only corpora."""
    if (folder / "run.json").is_file():
        return read(folder)
    if _names(folder) == {"data"} and any(folder.glob("data/*/manifest.json")):
        return {}
    raise InputError(f"MODEL_DIR = {folder}: not empty and not a run's folder (it has no run.json)")


def start_over(folder: Path) -> Callable[[str], bool]:
    """Removes the files of jobs from a run's folder, after printing what goes and what stays.

    Corpora (data/) stay, as they are right for any config. Links are removed without their targets.

    Returns:
        Function that tells whether the file of a name in the folder was removed.
    """
    if not (there := _names(folder)) or not _checked(folder):
        return lambda name: False
    goes = sorted(name for name in there if _WRITTEN.fullmatch(name))
    stays = sorted(there - {*goes, "data"})
    more = f"; stays: {', '.join(stays)}" if stays else ""
    print(f"--fresh: removed from {folder}: {', '.join(goes)}{more}", flush=True)
    # run.json goes last, so that an interruption leaves the folder's owner known.
    for name in sorted(goes, key="run.json".__eq__):
        remove(folder / name)
    return lambda name: _WRITTEN.fullmatch(name.split("/")[0]) is not None


def config_files(folder: Path) -> dict[str, bytes]:
    """Returns the content of the config's existing files."""
    paths = [folder / name for name in CONFIG_FILES]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def restore(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the config's files with their earlier content."""
    for name, content in files.items():
        with whole(folder / name) as unfinished:
            unfinished.write_bytes(content)


def note(folder: Path, **more: Any) -> None:
    """Adds entries of a job, with names of `_NOTES`, to run.json."""
    assert {*more} <= {*_NOTES}
    _write(folder, {**read(folder), **more})


def _write(folder: Path, about: Mapping[str, Any]) -> None:
    write_text(folder / "run.json", json.dumps(about, indent=1, ensure_ascii=False))


def check(folder: Path, config: Mapping[str, str], mutable: Collection[str]) -> None:
    """Raises InputError if an immutable setting differs, as in another config's folder."""
    changes = changed(read(folder), config, mutable)
    if not changes:
        return
    lines = [f"{name} is {there} there and {here} here" for name, (there, here) in changes.items()]
    more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
    raise InputError(
        f"MODEL_DIR = {folder} belongs to another config: {'; '.join(lines[:3])}"
        f"{more}; choose another MODEL_DIR, where {shlex.quote(f'--init_from={folder}')} "
        "--keep_optimizer continues from it, or start over with --fresh"
    )


def changed(
    record: Mapping[str, Any], config: Mapping[str, str], mutable: Collection[str]
) -> Changes:
    """Returns setting -> [value in run.json, in the config], for forbidden differences."""
    found = {}
    for name in {**record["config"], **config}:
        values = [one.get(name, "not set") for one in (record["config"], config)]
        if values[0] != values[1] and name not in mutable and name not in record["mutable"]:
            found[name] = values
    return found


def digest(folder: Path) -> str:
    """Returns the SHA-256 of run.json, by which processes check that they see the same folder."""
    return hashlib.sha256((folder / "run.json").read_bytes()).hexdigest()


def check_shared(folder: Path, written: str, shown: str, seconds: float = 30.0) -> None:
    """Raises InputError unless this process sees what another one has written in the folder.

    Args:
        written: `digest` in that process.
        shown: Name of the folder in messages.
        seconds: Maximum delay of a file server.
    """
    until = time.monotonic() + seconds
    while not (folder / "run.json").is_file() or digest(folder) != written:
        if time.monotonic() >= until:
            raise InputError(
                f"MODEL_DIR = {shown}: {socket.gethostname()} does not see there what process 0 "
                "wrote; it must be one folder that all processes share"
            )
        time.sleep(0.5)


def read(folder: Path) -> dict:
    """Returns run.json. Raises InputError if it is missing or damaged."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        raise InputError(f"{folder}: not a run's folder (no run.json); train first")
    return {"mutable": [], "versions": {}, "decoding": {}, **read_json(path, _RUN)}


def whole_setting(folder: Path, config: Mapping[str, str], name: str) -> int | None:
    """Returns an integer setting of run.json, or None. Raises InputError for other values."""
    if (said := config.get(name)) is None:
        return None
    with undamaged(folder / "run.json"):
        if not re.fullmatch(r"\d{1,18}", said):
            raise ValueError(f"config.{name} is {said[:60]}: must be a whole number")
        return int(said)


def decoding_of(folder: Path) -> dict[str, Any]:
    """Returns the settings of the translations in decodes/, or {} if run.json has none."""
    return read(folder)["decoding"] if (folder / "run.json").is_file() else {}
