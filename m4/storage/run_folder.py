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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m4.settings import InputError, Kind
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

# What run.json keeps of earlier jobs. initial: what the model was begun from; chapters: see
# m4.storage.chapters.
_NOTES = ("initial", "chapters")

# Kind -> setting -> [value before, now].
Changes = Mapping[Kind, Mapping[str, list[str]]]

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
    r"|chapters|vocabulary|checkpoints|tensorboard|stalls|profile|logs|decodes|baselines|compare"
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
    kinds: Mapping[str, Kind] | None = None,
    modules: Mapping[str, str] | None = None,
    chapters: Sequence[Mapping[str, Any]] | None = None,
    fresh: bool = False,
) -> None:
    """Makes the folder this config's, or checks that it already is.

    Args:
        folder: MODEL_DIR. config: setting -> value, as text. text: the whole config.
        kinds: setting -> whether it may change in one folder; one that is not there: never.
        modules: of the user's that the config imports -> their folders, for whoever reads it again.
        chapters: the run's, where a new one begins: settings may differ from now on.
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
            check(folder, config, kinds or {}, new_chapter=chapters is not None)
    versions = {name: _version(name) for name in _PACKAGES}
    kept = read(folder) if record.is_file() and not fresh else {}
    if kept and not there - _OWN and changed(kept, config, kinds or {})[Kind.NEVER]:
        kept = {}  # another config takes the folder over
    about = {
        **{name: kept[name] for name in _NOTES if name in kept},
        **({} if chapters is None else {"chapters": chapters}),
        "config": dict(config),
        **_listed(kinds or {}),
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


def check(
    folder: Path,
    config: Mapping[str, str],
    kinds: Mapping[str, Kind],
    *,
    new_chapter: bool = False,
) -> None:
    """ValueError: the folder belongs to another config: some setting differs that is not free,
    neither there nor here. new_chapter: where a chapter begins, others may differ too."""
    changes = changed(read(folder), config, kinds)
    if never := changes[Kind.NEVER]:
        raise InputError(
            f"MODEL_DIR = {remote.shown(folder)} belongs to another config: {_shown(never)}; "
            "choose another MODEL_DIR, or start over with --fresh"
        )
    if not new_chapter and (later := changes[Kind.FROM_NOW_ON]):
        raise InputError(
            f"MODEL_DIR = {remote.shown(folder)} is trained with another config: {_shown(later)}; "
            "m4 train --new_chapter trains on with it from the last checkpoint"
        )


def changed(
    record: Mapping[str, Any], config: Mapping[str, str], kinds: Mapping[str, Kind]
) -> Changes:
    """Kind -> setting -> [value in run.json, value in the config], of the settings that differ."""
    there = record["config"]
    found: dict[Kind, dict[str, list[str]]] = {kind: {} for kind in Kind}
    for name in {**there, **config}:
        before, now = (values.get(name, "not set") for values in (there, config))
        if before != now:
            kind = max(kinds.get(name, Kind.NEVER), record["kinds"].get(name, Kind.NEVER))
            found[kind][name] = [before, now]
    return found


def _shown(changes: Mapping[str, list[str]]) -> str:
    lines = [f"{name} is {there} there and {here} here" for name, (there, here) in changes.items()]
    more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
    return "; ".join(lines[:3]) + more


def _listed(kinds: Mapping[str, Kind]) -> dict[str, list[str]]:
    """The kinds as run.json has them."""
    return {
        name: sorted(setting for setting, kind in kinds.items() if kind is of)
        for name, of in _LISTS.items()
    }


_LISTS = {"mutable": Kind.FREE, "from_now_on": Kind.FROM_NOW_ON}


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
        kinds = {name: kind for key, kind in _LISTS.items() for name in record.get(key, [])}
        versions = {**record.get("versions", {})}
        return {**record, "config": {**record["config"]}, "kinds": kinds, "versions": versions}

    return read_json(path, parse)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
