"""The objects of a folder in a store: a bucket (gs://), or a disk that machines share (file://).

A store says of an object its size and version, and writes or removes it only while it is of the
version that the caller knows: that is all that a lease needs (`m4.storage.lease`).

Other object stores (s3://) are refused: m4 runs on Google's TPUs, and what it does with a bucket is
tested against an emulator of that one protocol.
"""

import contextlib
import email.utils
import fcntl
import functools
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from m4.settings import InputError
from m4.storage.files import whole

# The version of an object that is not there.
ABSENT = ""
_PIECE_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 24  # of one request to a bucket
_INSTALL = "pip install 'm4[gcs]'"


class Object(NamedTuple):
    """updated: seconds since 1970 by the store's clock."""

    size: int
    version: str
    updated: float


class Changed(Exception):
    """The object is not of the expected version. now: the time by the store's clock."""

    def __init__(self, name: str, now: float) -> None:
        super().__init__(f"{name}: changed meanwhile")
        self.now = now


class Unreachable(Exception):
    """The store does not answer: not a mistake, the job may be started again."""

    status = 1


# What else than `Changed` a store's methods raise.
ERRORS = (OSError, InputError, Unreachable)


class Store(Protocol):
    """A folder's objects, by their names relative to it, with "/"."""

    address: str

    def list(self, without: Collection[str] = ()) -> dict[str, Object]:
        """All but those below the top-level folders `without`."""
        ...

    def stat(self, name: str) -> Object | None: ...

    def read(self, name: str) -> bytes | None: ...

    def pieces(self, name: str) -> Iterator[bytes | memoryview]:
        """The object's bytes; a piece is what it is until the next one is asked for.

        Raises:
            FileNotFoundError: it is not there.
        """
        ...

    def download(self, name: str, target: Path) -> None:
        """The object as a file, whole or not at all."""
        ...

    def write(self, name: str, source: Path | bytes, version: str | None = None) -> str:
        """Writes an object, whole or not at all; returns its version.

        Raises:
            Changed: it is not of `version` (ABSENT: it is there). None: any.
        """
        ...

    def delete(self, name: str, version: str | None = None) -> None:
        """Removes an object, if it is there. Changed: it is of another version."""
        ...


def check_place(place: str) -> None:
    """ValueError: neither a folder's path nor an address of a store that m4 knows."""
    scheme, found, rest = place.partition("://")
    if not found:
        if wrong := re.match(r"(gs|s3|file):/*", place):  # pathlib, too, makes one slash of two
            raise InputError(f"{place}: an address begins with {wrong[1]}://")
        return
    if scheme not in ("gs", "file"):
        raise InputError(f"{place}: {scheme}:// is not supported; give a folder, or gs://")
    if scheme == "gs" and not rest.partition("/")[0]:
        raise InputError(f"{place}: no bucket is named; gs://BUCKET/FOLDER")


def check_address(address: str) -> None:
    """ValueError: no store that m4 knows, or Google's client is not installed."""
    check_place(address)
    if address.startswith("gs://"):
        try:
            import gcsfs  # noqa: F401 (epath's)
            from google.cloud import (
                storage,  # noqa: F401
                storage_control_v2,  # noqa: F401 (orbax's)
            )
        except ImportError as error:
            raise InputError(f"{address}: {error}; gs:// needs {_INSTALL}") from error


def open_store(address: str) -> Store:
    """The store of an address.

    Raises:
        ValueError: it cannot be used: what is missing, and what to do. Unreachable.
    """
    check_address(address)
    return Disk(address) if address.startswith("file://") else Bucket(address)


def check_readable(address: str) -> None:
    """Lists a folder of a bucket, and looks at its first object: for what is only read there.

    Raises:
        ValueError: it cannot be read: what is missing, and what to do. Unreachable.
    """
    check_address(address)
    name, _, folder = address.removeprefix("gs://").partition("/")
    with _explained(address, role="roles/storage.objectViewer"):
        bucket: Any = _client(os.environ.get("STORAGE_EMULATOR_HOST", "")).bucket(name)
        prefix = folder.rstrip("/") + "/" if folder else None
        for blob in bucket.list_blobs(prefix=prefix, max_results=1, retry=_retry(30)):
            bucket.get_blob(blob.name, retry=_retry(30))


class Disk:
    """A folder on a disk that every machine sees. Versions are inodes and times."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._folder = Path(address.removeprefix("file://"))

    def list(self, without: Collection[str] = ()) -> dict[str, Object]:
        found = {}
        for folder, folders, files in os.walk(self._folder):
            at = Path(folder).relative_to(self._folder)
            folders[:] = sorted(set(folders) - {*(without if at == Path() else ())})
            for name in ((at / file).as_posix() for file in files):
                if (there := self.stat(name)) is not None:
                    found[name] = there
        return found

    def stat(self, name: str) -> Object | None:
        try:
            found = (self._folder / name).stat()
        except FileNotFoundError:
            return None
        return Object(found.st_size, f"{found.st_ino}.{found.st_mtime_ns}", found.st_mtime)

    def read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / name).read_bytes()
        return None

    def pieces(self, name: str) -> Iterator[memoryview]:
        # One buffer that stays in the processor's cache: reading adds a twentieth to the time of
        # SHA-256. A new megabyte for each piece adds a quarter.
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        with (self._folder / name).open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                yield buffer[:size]

    def download(self, name: str, target: Path) -> None:
        with whole(target) as part:
            shutil.copyfile(self._folder / name, part)

    def write(self, name: str, source: Path | bytes, version: str | None = None) -> str:
        with self._if_unchanged(name, version), whole(self._folder / name) as part:
            part.write_bytes(source) if isinstance(source, bytes) else shutil.copyfile(source, part)
            made = part.stat()  # of this very file; the next writer's has another inode
        return f"{made.st_ino}.{made.st_mtime_ns}"

    def delete(self, name: str, version: str | None = None) -> None:
        with self._if_unchanged(name, version):
            (self._folder / name).unlink(missing_ok=True)
        if version is None:  # an object store has no empty folders
            with contextlib.suppress(OSError):
                for parent in PurePosixPath(name).parents[:-1]:
                    (self._folder / parent).rmdir()

    @contextlib.contextmanager
    def _if_unchanged(self, name: str, version: str | None) -> Iterator[None]:
        """Within it no other process writes an object with a precondition."""
        if version is None:
            yield
            return
        lock = self._folder / ".running" / ".lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            there = self.stat(name)
            if (ABSENT if there is None else there.version) != version:
                os.utime(lock)
                raise Changed(name, lock.stat().st_mtime)
            yield


class Bucket:
    """A folder of a bucket of Google Cloud Storage. Versions are generations."""

    def __init__(self, address: str) -> None:
        self.address = address
        name, _, folder = address.removeprefix("gs://").partition("/")
        self._prefix = f"{folder}/" if folder else ""
        with _explained(address):
            # orbax makes the same request: its right, storage.buckets.get, must not lack later.
            self._client: Any = _client(os.environ.get("STORAGE_EMULATOR_HOST", ""))
            self._bucket: Any = self._client.get_bucket(name, timeout=20, retry=_retry(30))

    def list(self, without: Collection[str] = ()) -> dict[str, Object]:
        with _explained(self.address):
            top = self._client.list_blobs(self._bucket, prefix=self._prefix, delimiter="/")
            found = [*top]
            for folder in sorted(top.prefixes):
                if folder.removeprefix(self._prefix).rstrip("/") not in without:
                    found += self._client.list_blobs(self._bucket, prefix=folder)
        return {
            blob.name.removeprefix(self._prefix): _object(blob)
            for blob in found
            if not blob.name.endswith("/")  # a sign for a folder, which some programs leave
        }

    def stat(self, name: str) -> Object | None:
        with _explained(self.address):
            blob = self._bucket.get_blob(self._prefix + name)
        return None if blob is None else _object(blob)

    def read(self, name: str) -> bytes | None:
        from google.api_core.exceptions import NotFound

        with _explained(self.address):
            try:
                return self._bucket.blob(self._prefix + name).download_as_bytes()
            except NotFound:
                return None

    def pieces(self, name: str) -> Iterator[bytes]:
        from google.api_core.exceptions import NotFound

        blob = self._bucket.blob(self._prefix + name)
        with _explained(self.address, name):
            try:
                with blob.open("rb", chunk_size=_CHUNK_BYTES) as file:
                    while piece := file.read(_PIECE_BYTES):
                        yield piece
            except NotFound as error:
                raise FileNotFoundError(f"{self.address}/{name}") from error

    def download(self, name: str, target: Path) -> None:
        with _explained(self.address), whole(target) as part:
            self._bucket.blob(self._prefix + name).download_to_filename(str(part))

    def write(self, name: str, source: Path | bytes, version: str | None = None) -> str:
        blob = self._bucket.blob(self._prefix + name)
        expected = None if version is None else int(version or 0)
        with _explained(self.address, name):
            if isinstance(source, bytes):
                blob.upload_from_string(source, if_generation_match=expected)
            else:
                blob.upload_from_filename(str(source), if_generation_match=expected)
        return str(blob.generation)

    def delete(self, name: str, version: str | None = None) -> None:
        from google.api_core.exceptions import NotFound

        expected = None if version is None else int(version or 0)
        with _explained(self.address, name), contextlib.suppress(NotFound):
            self._bucket.blob(self._prefix + name).delete(if_generation_match=expected)


def _object(blob: Any) -> Object:
    return Object(blob.size, str(blob.generation), blob.updated.timestamp())


@functools.cache
def _client(_emulator: str) -> Any:
    from google.cloud import storage

    return storage.Client()


def _retry(seconds: float) -> Any:
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(seconds)


@contextlib.contextmanager
def _explained(
    address: str, name: str = "", role: str = "roles/storage.objectAdmin"
) -> Iterator[None]:
    """Errors of Google's client as those of this module, each with one line. role: which has the
    rights that are needed."""
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth
    from requests.exceptions import RequestException

    try:
        yield
    except api.PreconditionFailed as error:
        date = error.response.headers["Date"]  # type: ignore[union-attr]
        raise Changed(name, email.utils.parsedate_to_datetime(date).timestamp()) from error
    except api.Forbidden as error:
        raise InputError(_forbidden(address, one_line(error), role)) from error
    except (auth.DefaultCredentialsError, auth.RefreshError, api.Unauthorized) as error:
        raise InputError(
            f"{address}: no valid credentials: gcloud auth application-default login, or a machine "
            f"with a service account ({one_line(error)})"
        ) from error
    except api.NotFound as error:
        bucket = address.removeprefix("gs://").partition("/")[0]
        raise InputError(
            f"{address}: no bucket {bucket}, or no such object there: correct the name, or make "
            f"the bucket (gcloud storage buckets create gs://{bucket} --location=REGION)"
        ) from error
    except (api.GoogleAPIError, auth.GoogleAuthError, RequestException) as error:
        raise Unreachable(f"{address}: cannot be reached ({one_line(error)})") from error
    except OSError as error:
        if "Project was not passed" not in str(error):
            raise
        raise InputError(
            f"{address}: Google's client wants to know a project: set GOOGLE_CLOUD_PROJECT"
        ) from error


def _forbidden(address: str, said: str, role: str) -> str:
    """What to do about status 403. role: of all rights but storage.buckets.get."""
    bucket = f"gs://{address.removeprefix('gs://').partition('/')[0]}"
    if "scope" in said:
        return (
            f"{address}: the machine's access scope is too small: create it with the scope "
            f"cloud-platform ({said})"
        )
    who = re.search(r"([\w.+-]+@\S+) does not have", said)
    right = re.search(r"storage\.\w+\.\w+", said)
    if right is None:
        role = f"{role} and roles/storage.legacyBucketReader"
    elif right[0] == "storage.buckets.get":  # no role for objects has it
        role = "roles/storage.legacyBucketReader"
    return (
        f"{address}: {who[1] if who else 'this account'} lacks "
        f"{right[0] if right else 'a right'}: grant it {role} on {bucket} "
        "(gcloud storage buckets add-iam-policy-binding)"
    )


def one_line(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
