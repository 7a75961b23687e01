"""A folder in a store (gs://bucket/run): a working copy on this machine's disk, and who may write.

Jobs append to files, rename, lock and map them into memory, which object stores do not do. So they
work in a local folder. The job's primary process brings it up to date at the start, and uploads
what has changed before each checkpoint, every half minute and at the end. Checkpoints, which are
large and sharded over all processes, go straight to the store (orbax).

Files are of kinds, and jobs that write files of different kinds work at the same time. A job locks
its kinds on this machine (`.lock.<kind>`) and in the store (`m4.storage.lease`), and uploads and
removes no others. A working copy has a file `.remote` with its address and the copy's name.
"""

import contextlib
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from etils import epath

from m4.settings import InputError
from m4.storage import lease
from m4.storage.files import open_lock, write_text
from m4.storage.store import check_address, check_place
from m4.storage.working_copy import (
    KIND,
    MARK,
    WorkingCopy,
    locked_kinds,
    mark_of,
    not_compiled,
    open_copies,
)

_requested: set[Path] = set()  # working copies whose address this process was given


def is_remote(model_dir: str) -> bool:
    """Whether it is an address (gs://bucket/run) and no path."""
    return "://" in model_dir


def is_local_file(name: str) -> bool:
    """Whether a file of that name is of this machine, and not of the folder's content."""
    return name.startswith((".remote", ".lock"))


def local(model_dir: str) -> Path:
    """The folder to work in: a path's own, an address's working copy. Downloads nothing.

    Working copies are in $XDG_CACHE_HOME/m4 (~/.cache/m4).

    Raises:
        ValueError: not a store that m4 knows, or one that needs a package.
    """
    check_place(model_dir)
    if not is_remote(model_dir):
        return Path(model_dir)
    check_address(model_dir)
    address = model_dir.rstrip("/")
    folder = _copy_of(address)
    if not (folder / MARK).is_file():
        write_text(folder / MARK, f"{address}\n{uuid.uuid4().hex}\n")
    _requested.add(folder)
    return folder


def remote_path(folder: Path) -> epath.Path:
    """Where a folder within a run's folder really is: for a working copy, in the store."""
    for parent in (folder, *folder.parents):
        if is_working_copy(parent):
            # epath knows no file://
            address = epath.Path(mark_of(parent)[0].removeprefix("file://"))
            return address / folder.relative_to(parent).as_posix()
    return epath.Path(folder)


def is_working_copy(folder: Path) -> bool:
    """Whether the store has this folder.

    Raises:
        ValueError: its mark names an address whose working copy is elsewhere: a folder that was
            made by a stranger must not decide where files are written and deleted.
    """
    if not (folder / MARK).is_file():
        return False
    address = mark_of(folder)[0]
    if folder.absolute() not in _requested and folder.absolute() != _copy_of(address):
        raise InputError(
            f"{folder}/{MARK} names {address}, whose working copy is another folder: give "
            "--model_dir the address, or remove that file"
        )
    return True


def shown(folder: Path) -> str:
    """The folder in messages: of a working copy the address, which is what a user has given."""
    return mark_of(folder)[0] if is_working_copy(folder) else str(folder)


def shown_file(path: Path) -> str:
    """A file in messages: of a working copy its address and the copy, which programs can open."""
    there = str(remote_path(path))
    return there if there == str(path) else f"{there}, here {path}"


def fetch(folder: Path, wanted: Callable[[str], bool] = not_compiled) -> None:
    """Brings a working copy up to date, for reading; does nothing with another folder.

    Nor while a job of this machine works in it: that job keeps it up to date, and has files open
    that must not be replaced. wanted: whether a file is needed, by its name in the folder.
    """
    if is_working_copy(folder) and not locked_kinds(folder):
        WorkingCopy(folder).pull(wanted)


def push(folder: Path) -> None:
    """Uploads what this process's jobs have changed in the working copy around `folder`.

    Raises:
        lease.LeaseLost: another job has it now.
        ERRORS: the store cannot be reached for minutes.
    """
    for copy in _copies_around(folder):
        copy.push_with_retries()


def lease_lost(folder: Path) -> bool:
    """Whether this process had a lease of what `folder` is in, and lost it."""
    return any(lease.first_lost(copy.leases) for copy in _copies_around(folder))


def start_over(folder: Path, written: Callable[[str], bool] = lambda name: True) -> None:
    """Removes what the store has of a folder all of whose kinds this process has locked.

    written: of a file, by its name in the folder, whether it is to go.
    """
    for copy in _copies_around(folder):
        copy.clear(written)


@contextlib.contextmanager
def locked(
    folder: Path,
    setting: str = "MODEL_DIR",
    *,
    kinds: Collection[str] = (KIND,),
    kind_of: Callable[[str], str] = lambda name: KIND,
    wait: bool = True,
) -> Iterator[None]:
    """One job at a time writes files of a kind into a folder; the store follows a working copy.

    Args:
        setting: the folder's name, for messages. kind_of: a file's kind, by its name in the folder.
        wait: whether to wait until the lease of a job that has died expires.

    Raises:
        Busy: another job is at work there.
        ValueError: the folder cannot be written, or the store not used.
        LeaseLost: another job has taken it over meanwhile; from a signal, at any moment.
        UploadFailed: the last files could not be uploaded.
        ERRORS: the store cannot be reached; the job may be started again.
    """
    where = f"{setting} = {shown(folder)}"
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(_lock(folder, kind, where))
        if kinds and is_working_copy(folder):
            copy = WorkingCopy(folder, where, kinds, kind_of)
            stack.enter_context(copy.leased(wait=wait))
        yield


@contextlib.contextmanager
def _lock(folder: Path, kind: str, where: str) -> Iterator[None]:
    """The lock of a kind among this machine's processes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_lock(folder / f".lock.{kind}")
    except OSError as error:
        raise InputError(f"{where}: cannot be made or written ({error})") from error
    with file:
        for attempt in range(5):  # a job that starts has others' locks for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 4:
                    raise lease.Busy(f"{where}: another m4 job is at work there") from None
            time.sleep(0.1)
        yield


def _copy_of(address: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m4"
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return base.absolute() / f"{address.rsplit('/', 1)[-1]}.{digest}"


def _copies_around(folder: Path) -> list[WorkingCopy]:
    return [copy for copy in open_copies if copy.here in (folder, *folder.parents)]
