"""A full disk and a folder that cannot be written, by file systems of a child's own.

A child that may make a mount namespace (root, or any user where user namespaces are allowed) mounts
a tmpfs of a given size, or the folder itself read-only. Elsewhere a limit on the size of a file
stands for the full disk, and a folder's mode for the other: `means` says which.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos.forks import Ended, in_child
from tests.chaos.trial import Trial, again, bad_end, said
from tests.chaos.world import AFTER, World, job

_NEW_NAMESPACE, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _PRIVATE = 1, 32, 4096, (1 << 18) | 16384
WHERE = {"train": "begun", "decode": "finished", "report": "compared"}
WHERE |= dict.fromkeys(AFTER, "finished")


def means() -> str:
    """ "namespaces", or "limits" where a child cannot mount."""
    with tempfile.TemporaryDirectory() as folder:
        return "namespaces" if in_child(lambda: _try(Path(folder))).status == 0 else "limits"


def _try(folder: Path) -> int:
    namespace()
    mount("tmpfs", folder, "tmpfs", 0, "size=64k")
    mount("", folder, "", _REMOUNT, "size=128k")
    return 0


def namespace() -> None:
    """Mounts of this process are its own from here on."""
    user, group = os.getuid(), os.getgid()
    root = user == 0
    _call("unshare", _NEW_NAMESPACE | (0 if root else _NEW_USER))
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount("", Path("/"), "", _PRIVATE)


def mount(what: str, where: Path, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() or None for word in (what, str(where), kind)]
    _call("mount", *words, ctypes.c_ulong(flags), options.encode() or None)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def full(world: World, job_name: str, draw: random.Random) -> Trial:
    """The disk is full somewhere in the job; then it has room, and the same command is run."""
    state = WHERE[job_name]
    world.begin(state)
    before = used(world.run)
    after = {"train": "finished", **{name: name for name in AFTER}}.get(job_name, "whole")
    needed = max(used(world.state(after)) - before, 1)
    room = draw.randrange(needed)
    trial = Trial("disk full", job_name, f"{job_name}: room for {room} more bytes", "", "", state)
    if world.means == "limits":
        return _limited(world, trial, job_name, room)

    def mounted(target: Path) -> None:
        namespace()
        mount("tmpfs", target, "tmpfs", 0, f"size={before + room}")
        shutil.copytree(world.state(state), target, dirs_exist_ok=True)

    def freed(target: Path) -> None:
        mount("", target, "", _REMOUNT, f"size={1 << 30}")

    return _within(world, trial, job_name, mounted, freed)


def read_only(world: World, job_name: str) -> Trial:
    """The folder cannot be written; then it can, and the same command is run."""
    state = WHERE[job_name]
    world.begin(state)
    trial = Trial("read-only folder", job_name, job_name, "", "", state)
    if world.means == "limits":
        with _modes(world.run):
            refused = job(job_name, world.run)
        return _refused_then(world, trial, job_name, refused)

    def mounted(target: Path) -> None:
        namespace()
        mount(str(target), target, "", _BIND)
        mount("", target, "", _REMOUNT | _BIND | _READ_ONLY)

    def freed(target: Path) -> None:
        mount("", target, "", _REMOUNT | _BIND)

    return _within(world, trial, job_name, mounted, freed)


def used(folder: Path) -> int:
    """What a folder takes of a tmpfs: whole pages."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(-(-size // 4096) * 4096 for size in sizes)


def _within(
    world: World,
    trial: Trial,
    job_name: str,
    mounted: Callable[[Path], None],
    freed: Callable[[Path], None],
) -> Trial:
    """The trial in a child with its own mounts, all of it: they end with the child."""
    with tempfile.NamedTemporaryFile("r") as verdict:

        def work() -> int:
            mounted(world.run)
            ended = job(job_name, world.run)
            freed(world.run)
            found = _refused_then(world, trial, job_name, ended)
            Path(verdict.name).write_text(json.dumps([found.verdict, found.said]))
            return 0

        ended = in_child(work, most_seconds=600)
        if ended.status != 0:
            raise RuntimeError(ended.err)
        return _with(trial, *json.load(verdict))


def _refused_then(world: World, trial: Trial, job_name: str, ended: Ended) -> Trial:
    bad = bad_end(ended)
    after = again(world, trial, job_name)
    if after.verdict != "survived":
        return _with(trial, "lost" if bad else after.verdict, f"{said(ended)}; {after.said}")
    return _with(trial, bad or "survived", said(ended))


def _limited(world: World, trial: Trial, job_name: str, room: int) -> Trial:
    def work() -> int:
        from tests.chaos.world import main

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return main(job_name, world.run)

    return _refused_then(world, trial, job_name, in_child(work))


@contextlib.contextmanager
def _modes(folder: Path) -> Iterator[None]:
    """No user may write: of no effect for root, who can mount."""
    modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")]}
    for path, mode in modes.items():
        path.chmod(stat.S_IMODE(mode) & ~0o222)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(stat.S_IMODE(mode))


def _with(trial: Trial, verdict: str, text: str) -> Trial:
    return Trial(trial.category, trial.kind, trial.detail, verdict, text, trial.state)
