"""A model's folder: whose it is, what made it, and that one job at a time works in it."""

import fcntl
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from m4.storage import remote
from m4.storage.files import write_text

# What may change between two runs in one folder: how long, how often, and what comes after
# training. Everything else decides the model.
FREE = (
    "MODEL_DIR",
    "TRAIN_STEPS",
    "cache.prepare.rebuild",
    "jobs.Decoding.",
    "jobs.Setup.about",
    "jobs.Setup.baselines",
    "jobs.Setup.decoding",
    "jobs.Setup.dev_",
    "jobs.Setup.high",
    "jobs.Setup.low",
    "jobs.Setup.model_dir",
    "jobs.Setup.total_steps",
    "loop.train.checkpoint_period",
    "loop.train.keep",
    "loop.train.log_period",
    "loop.train.rules",
    "loop.train.tensorboard",
    "loop.train.zero",
    "report.",
    "mesh.",
)

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


# Of this machine, not of the run (`m4.storage.remote`).
_HERE = {".lock", ".remote", ".remote.json"}

# A folder with nothing else in it has made nothing that another config could spoil: a corpus
# (data/) checks for itself whether it is the config's.
_OWN = {".lock", "run.json", "config.gin", "operative_config.gin", "compilation_cache", "data"}
_OWN |= {".data.hashes.json"} | _HERE
_OWN |= {f"{name}.{ending}" for name in ("data_preview", "data_report", "vocabulary_report")
         for ending in ("json", "html", "png", "pdf")}  # fmt: skip


def claim(folder: Path, config: Mapping[str, str], text: str, *, fresh: bool = False) -> None:
    """Makes the folder this config's own, or checks that it already is.

    Args:
        folder: MODEL_DIR. config: binding -> value, as text. text: the whole gin config.
        fresh: start over: what is there is removed (only if it is a model's folder).

    Raises:
        ValueError: it belongs to another config, or is somebody else's folder.
    """
    record = folder / "run.json"
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if remote.remote_path(folder / "checkpoints").exists():
        there.add("checkpoints")
    if there - _HERE:
        if not record.is_file():
            raise ValueError(
                f"MODEL_DIR = {folder}: not empty and not a model's folder (it has no run.json)"
            )
        if fresh:
            # The record last: killed in the middle, it is still a model's folder.
            for path in sorted(folder.iterdir(), key=lambda path: path == record):
                if path.name not in _HERE:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            remote.start_over(folder)
        elif there - _OWN:
            check(folder, config)
    versions = {name: _version(name) for name in _PACKAGES}
    about = {
        "config": dict(config),
        "versions": {**versions, "python": platform.python_version()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "command": sys.argv,
    }
    write_text(record, json.dumps(about, indent=1, ensure_ascii=False))
    write_text(folder / "config.gin", text)
    remote.push(folder)


def check(folder: Path, config: Mapping[str, str]) -> None:
    """ValueError: what is in the folder was made with another config (binding -> value)."""
    if differences := _differences(read(folder)["config"], config):
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ValueError(
            f"MODEL_DIR = {folder} belongs to another config: {'; '.join(differences[:3])}"
            f"{more}; choose another MODEL_DIR, or start over with --fresh"
        )


def digest(folder: Path) -> str:
    """SHA-256 of what `claim` wrote: other processes tell by it that they see the same folder."""
    return hashlib.sha256((folder / "run.json").read_bytes()).hexdigest()


def check_shared(folder: Path, written: str, seconds: float = 30.0) -> None:
    """ValueError: this process does not see in the folder what another one has written there.

    written: `digest` in that process. seconds: for how long a file server may be behind.
    """
    until = time.monotonic() + seconds
    while not (folder / "run.json").is_file() or digest(folder) != written:
        if time.monotonic() >= until:
            raise ValueError(
                f"MODEL_DIR = {folder}: {socket.gethostname()} does not see there what the first "
                "process wrote; it must be one folder that all processes share"
            )
        remote.fetch(folder)
        time.sleep(0.5)


def write_operative(folder: Path, text: str) -> None:
    """Keeps the operative config: gin's, of what this job called, over that of earlier jobs.

    A second run that trains nothing must not forget how the model was trained.
    """
    path = folder / "operative_config.gin"
    there = _sections(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_text(path, "\n".join({**there, **_sections(text)}.values()))


def _sections(text: str) -> dict[str, str]:
    """gin's text by the heading of each part: imports, "# Macros:", "# Parameters for ...:"."""
    parts = re.split(r"\n(?=# (?:Macros|Parameters for .*):\n)", text)
    return {part.split("\n")[0] if part.startswith("# ") else "": part for part in parts}


def read(folder: Path) -> dict:
    """What `claim` wrote. ValueError: no model's folder."""
    record = Path(folder) / "run.json"
    if not record.is_file():
        raise ValueError(f"{folder}: not a model's folder (no run.json); train first")
    return json.loads(record.read_text(encoding="utf-8"))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One job at a time. ValueError: another process is at work there, or no folder can be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"MODEL_DIR = {folder}: no folder can be made there ({error})") from error
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"MODEL_DIR = {folder}: another m4 job is at work there") from None
        with remote.synced(folder):
            yield


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    # A scope ("low/baselines.Recipe.width") belongs to what it scopes.
    names = [
        name
        for name in {**there, **here}
        if not name.split("/")[-1].startswith((*FREE, "baselines."))
    ]
    return [
        f"{name} is {there.get(name, 'not set')} there and {here.get(name, 'not set')} here"
        for name in names
        if there.get(name) != here.get(name)
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
