"""A disk that stands in for a store, and its other users."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m4.storage import lease, remote
from m4.storage.store import Disk


def another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    return remote.local(f"file://{store}")


def marks(store: Path) -> list[Path]:
    """The leases in a store."""
    return sorted((store / lease.RUNNING).glob("[!.]*.json"))


def take_over(store: Path) -> None:
    """What a job of another machine does for which this one's lease has expired."""
    (mine,) = marks(store)
    mark = {"job": "another", "host": "elsewhere", "pid": 7, "copy": "a copy"}
    Disk(f"file://{store}").write(f"{lease.RUNNING}/{mine.name}", json.dumps(mark).encode())


def files(folder: Path) -> dict[str, bytes]:
    """What is in a store, without leases."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and lease.RUNNING not in path.parts
    }
