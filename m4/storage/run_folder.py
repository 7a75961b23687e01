"""A run's folder (MODEL_DIR): one config, one job at a time, and a record of what made it."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from m4.settings import InputError
from m4.storage import remote
from m4.storage.files import read_json, whole, write_text

_PACKAGES = [
    "m4",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "seqio",
    "sentencepiece",
    "babel",
    "sacrebleu",
    "numpy",
]

# The folder of what the model needs of its corpus: its languages and vocabularies.
VOCABULARY = "vocabulary"
# What run.json keeps of earlier jobs. initial: the run that this one was begun from.
_NOTES = ("initial",)

# Setting -> [value before, now].
Changes = Mapping[str, list[str]]

# Jobs that write files of different kinds may work at the same time.
KINDS = ("train", "eval", "steps", "data", "baselines")
_KIND_OF = (
    (r"(compare/\w+/)?decodes/\d+/|scores_by_step\.", "steps"),
    (
        r"(compare/\w+/)?decodes/|scores\.(dev\.)?jsonl$|(deltas|rates)\.jsonl$|delta_bleu\."
        r"|report\.html$",
        "eval",
    ),
    (r"(data_preview|data_report|dropped|vocabulary_report)\.", "data"),
    (r"baselines/", "baselines"),
)

# In a folder with nothing else no work is lost: another config may take it over. A corpus (data/)
# checks for itself whether it is the config's.
_CONFIG = {"run.json", "config.gin", "operative_config.gin"}
_OWN = {*_CONFIG, "compilation_cache", "data"}
_OWN |= {".data.hashes.json", "vocabulary"}
_OWN |= {f"{name}.{ending}" for name in ("data_preview", "data_report", "vocabulary_report")
         for ending in ("json", "html", "png", "pdf")}  # fmt: skip


_BY_THE_WAY = {"compilation_cache", "heartbeat.json", "logs"}

# Everything that jobs write at the top of the folder (docs/run_folder.md). A user's files stay.
_WRITTEN = re.compile(
    r"run\.json|(operative_)?config\.gin|heartbeat\.json|metrics\.jsonl|report\.html"
    r"|dropped\.jsonl\.gz|(data_preview|data_report|vocabulary_report|delta_bleu)\.\w+"
    r"|(scores|deltas|rates|scores_by_step)(\.\w+)?\.(jsonl|png|pdf)|atlas(\.\w+)?\.(json|png)"
    r"|vocabulary|checkpoints|tensorboard|stalls|profile|logs|decodes|baselines|compare"
    r"|compilation_cache|\.data\.(hashes\.json|[0-9a-f]{8}(\.old)?)"
)


def kind_of(name: str) -> str:
    """The kind of a file, by its name in a run's folder."""
    if match := re.match(r"compilation_cache/(\w+)/", name):
        return match[1]
    return next((kind for pattern, kind in _KIND_OF if re.match(pattern, name)), "train")


def locked(folder: Path, *kinds: str, wait: bool = True) -> contextlib.AbstractContextManager[None]:
    """`remote.locked` for files of these kinds of a run's folder."""
    return remote.locked(folder, kinds=kinds, kind_of=kind_of, wait=wait)


def claim(
    folder: Path,
    config: Mapping[str, str],
    text: str,
    *,
    mutable: Collection[str] = (),
    modules: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> None:
    """Makes the folder this config's, or checks that it already is.

    Args:
        folder: MODEL_DIR. config: setting -> value, as text. text: the whole config.
        mutable: The settings that may change in one folder.
        modules: of the user's that the config imports -> their folders, for whoever reads it again.
        fresh: start over: what jobs wrote is removed (only from a run's folder).

    Raises:
        ValueError: it belongs to another config, or is no run's folder.
    """
    record = folder / "run.json"
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    there = {name for name in there if not remote.is_local_file(name)}
    if remote.remote_path(folder / "checkpoints").exists():
        there.add("checkpoints")
    if there:
        if not record.is_file():
            raise InputError(
                f"MODEL_DIR = {remote.shown(folder)}: not empty and not a run's folder "
                "(it has no run.json)"
            )
        if fresh:
            _start_over(folder)
        elif there - _OWN:
            check(folder, config, mutable)
    versions = {name: _version(name) for name in _PACKAGES}
    kept = read(folder) if record.is_file() and not fresh else {}
    if kept and not there - _OWN and changed(kept, config, mutable):
        kept = {}  # another config takes the folder over
    about = {
        **{name: kept[name] for name in _NOTES if name in kept},
        "config": dict(config),
        "mutable": sorted(mutable),
        "modules": dict(modules or {}),
        "versions": {**versions, "python": platform.python_version()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "command": sys.argv,
    }
    write_text(record, json.dumps(about, indent=1, ensure_ascii=False))
    write_text(folder / "config.gin", text)
    remote.push(folder)


def _start_over(folder: Path) -> None:
    """Removes what jobs have written into the folder, and prints first what goes and what stays.

    Of a link only the link goes. A folder data/ is a corpus if it has a corpus's manifest.
    """
    names = sorted(path.name for path in folder.iterdir() if not remote.is_local_file(path.name))
    goes = [name for name in names if _is_written(folder, name)]
    stays = "".join(f"; stays: {', '.join(rest)}" for rest in [sorted({*names} - {*goes})] if rest)
    print(f"--fresh: removed from {remote.shown(folder)}: {', '.join(goes)}{stays}", flush=True)
    # run.json last: where this is killed half way, it is still known whose folder it is.
    for path in sorted((folder / name for name in goes), key=lambda path: path.name == "run.json"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    remote.start_over(folder, lambda name: _is_written(folder, name.split("/")[0]))


def _is_written(folder: Path, name: str) -> bool:
    if name == "data":
        data = folder / name
        return data.is_symlink() or not data.exists() or (data / "manifest.json").is_file()
    return _WRITTEN.fullmatch(name) is not None


def note(folder: Path, **more: Any) -> None:
    """Adds to run.json what one of its jobs has found out: names of `_NOTES`."""
    assert {*more} <= {*_NOTES}
    record = read_json(folder / "run.json")
    write_text(folder / "run.json", json.dumps({**record, **more}, indent=1, ensure_ascii=False))


def check(folder: Path, config: Mapping[str, str], mutable: Collection[str]) -> None:
    """ValueError: the folder belongs to another config: a setting differs that is not mutable."""
    changes = changed(read(folder), config, mutable)
    if not changes:
        return
    lines = [f"{name} is {there} there and {here} here" for name, (there, here) in changes.items()]
    more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
    raise InputError(
        f"MODEL_DIR = {remote.shown(folder)} belongs to another config: {'; '.join(lines[:3])}"
        f"{more}; choose another MODEL_DIR, where --init_from={remote.shown(folder)} "
        "--keep_optimizer continues from it, or start over with --fresh"
    )


def changed(
    record: Mapping[str, Any], config: Mapping[str, str], mutable: Collection[str]
) -> Changes:
    """Returns setting -> [value in run.json, value in the config], where they differ.

    Args:
        record: What `read` gave.
        config: Setting -> value, as text.
        mutable: The config's mutable settings, which are left out as those of `record` are.
    """
    found = {}
    for name in {**record["config"], **config}:
        values = [one.get(name, "not set") for one in (record["config"], config)]
        if values[0] != values[1] and name not in mutable and name not in record["mutable"]:
            found[name] = values
    return found


def digest(folder: Path) -> str:
    """SHA-256 of run.json, by which other processes check that they see the same folder."""
    return hashlib.sha256((folder / "run.json").read_bytes()).hexdigest()


def check_shared(folder: Path, written: str, seconds: float = 30.0) -> None:
    """Checks that this process sees in the folder what another one has written there.

    Args:
        written: `digest` in that process. seconds: for how long a file server may be behind.

    Raises:
        ValueError: it does not.
    """
    until = time.monotonic() + seconds
    while not (folder / "run.json").is_file() or digest(folder) != written:
        if time.monotonic() >= until:
            raise InputError(
                f"MODEL_DIR = {remote.shown(folder)}: {socket.gethostname()} does not see there "
                "what process 0 wrote; it must be one folder that all processes share"
            )
        remote.fetch(folder, lambda name: name in ("run.json", "config.gin"))
        time.sleep(0.5)


class Contents(NamedTuple):
    """What a run's folder has: its config's files, and when all else there was last changed."""

    config: dict[str, bytes]
    changed: dict[str, tuple[int, int]]


def contents(folder: Path) -> Contents:
    """What `put_back` needs; without hidden files, compiled programs and the heartbeat."""
    config, changed = dict[str, bytes](), dict[str, tuple[int, int]]()
    for path in folder.iterdir():
        if path.name in _CONFIG:
            config[path.name] = path.read_bytes()
        elif not path.name.startswith(".") and path.name not in _BY_THE_WAY:
            status = path.lstat()
            changed[path.name] = (status.st_mtime_ns, status.st_size)
    return Contents(config, changed)


def put_back(folder: Path, before: Contents) -> None:
    """The config's files as they were. Of a new folder they stay: they say whose folder it is."""
    for name, content in before.config.items():
        with whole(folder / name) as unfinished:
            unfinished.write_bytes(content)
    if before.config:
        remote.push(folder)


def write_operative(folder: Path, text: str) -> None:
    """Keeps the operative config: of what this job called, over that of earlier jobs.

    Without that, a second run that trains nothing would drop how the model was trained.

    Raises:
        InputError: what is there is damaged: not UTF-8.
    """
    path = folder / "operative_config.gin"
    try:
        there = _sections(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: damaged, not UTF-8 (byte {error.start:,}); remove it, and this job writes "
            "what it called"
        ) from error
    write_text(path, "\n".join({**there, **_sections(text)}.values()))


def _sections(text: str) -> dict[str, str]:
    """gin's text by the heading of each part: imports, "# Macros:", "# Parameters for ...:"."""
    parts = re.split(r"\n(?=# (?:Macros|Parameters for .*):\n)", text)
    return {part.split("\n")[0] if part.startswith("# ") else "": part for part in parts}


def read(folder: Path) -> dict:
    """What `claim` wrote. ValueError: no run's folder, or its run.json is damaged."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        raise InputError(
            f"{remote.shown(Path(folder))}: not a run's folder (no run.json); train first"
        )

    def parse(record: dict[str, Any]) -> dict[str, Any]:
        versions, mutable = {**record.get("versions", {})}, [*record.get("mutable", [])]
        return {**record, "config": {**record["config"]}, "mutable": mutable, "versions": versions}

    return read_json(path, parse)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
