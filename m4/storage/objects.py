"""Objects in a bucket, by obstore (its only importer).

m4 needs five requests: list, get, put, conditional put (for locks) and delete. Other addresses than
gs:// are refused: orbax writes checkpoints to no other store, and m4 is tested with no other.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from m4.settings import InputError, check_name
from m4.storage.files import whole

# Version of an object's content, for `put_if`. None stands for a missing object.
Version = Mapping[str, Any]

_CHUNK_BYTES = 16 << 20  # bytes per request: larger files are sent in parts
_RETRY_SECONDS = 60.0  # seconds for which a failing request is repeated


class Object(NamedTuple):
    """Size in bytes, version of the content (ETag), and time of change in seconds since 1970."""

    size: int
    version: str
    updated: float


class Unreachable(Exception):
    """The bucket does not answer. This is not a user's mistake: the job may be started again."""

    status = 1


class Changed(Exception):
    """An object's version is not the expected one."""


# All other errors of requests.
ERRORS = (OSError, InputError, Unreachable)


def is_address(place: str) -> bool:
    """Returns whether `place` is an address (gs://BUCKET/FOLDER), not a path."""
    return "://" in place


def check_place(place: str) -> None:
    """Raises InputError unless `place` is a path or the address of a bucket."""
    check_name(place)
    scheme, found, rest = place.partition("://")
    if not found:
        if wrong := re.match(r"(gs|s3|file):/*", place):  # pathlib makes one slash of two
            raise InputError(f"{place}: an address begins with {wrong[1]}://")
    elif scheme != "gs":
        raise InputError(f"{place}: {scheme}:// is not supported; give a folder, or gs://")
    elif not rest.partition("/")[0]:
        raise InputError(f"{place}: no bucket is named; gs://BUCKET/FOLDER")


def check_readable(address: str) -> None:
    """Checks a bucket's folder for reading: lists it, and reads the first object.

    Raises:
        InputError: It cannot be read; the message says what to do.
        Unreachable: The bucket does not answer.
    """
    objects = Objects(address)
    objects.role = "roles/storage.objectViewer"
    for name in [*objects.list()][:1]:
        next(objects.pieces(name), None)


class Objects:
    """Objects of a folder in a bucket, by relative names with "/"."""

    # Roles that the account needs, for messages.
    role = "roles/storage.objectAdmin and roles/storage.legacyBucketReader"

    def __init__(self, address: str) -> None:
        """Prepares requests, without sending one.

        Args:
            address: gs://BUCKET/FOLDER. STORAGE_EMULATOR_HOST names an emulator.

        Raises:
            InputError: The address is invalid, or this machine's credentials cannot be read.
        """
        import obstore.exceptions
        import obstore.store

        check_place(address)
        self._obstore = obstore  # imported here because it takes long, and only buckets need it
        self.address = address.rstrip("/")
        self._bucket, _, folder = self.address.removeprefix("gs://").partition("/")
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        options: Any = {"client_options": {"allow_http": bool(emulator)}}
        options["retry_config"] = {"retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
        if emulator:
            options["config"] = {"base_url": emulator, "bearer_token": "none"}
        with self._explained():
            self._store = obstore.store.GCSStore(self._bucket, prefix=folder or None, **options)

    def list(self) -> dict[str, Object]:
        """Returns name -> size, version and time of each object."""
        with self._explained():
            found = [one for page in self._obstore.list(self._store) for one in page]
        # The console makes an empty object for a folder, which obstore names like the folder.
        folders = {str(parent) for one in found for parent in PurePosixPath(one["path"]).parents}
        return {
            one["path"]: Object(one["size"], one["e_tag"] or "", one["last_modified"].timestamp())
            for one in found
            if one["path"] and one["path"] not in folders
        }

    def get_version(self, name: str) -> tuple[bytes, Version] | None:
        """Returns an object's content and version, or None if it does not exist."""
        with self._explained(name), contextlib.suppress(FileNotFoundError):
            found = self._obstore.get(self._store, name)
            version = {"e_tag": found.meta["e_tag"], "version": found.meta["version"]}
            return bytes(found.bytes()), version
        return None

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yields an object's content in pieces. Raises FileNotFoundError if it is missing."""
        with self._explained(name):
            for piece in self._obstore.get(self._store, name).stream(1 << 20):
                yield bytes(piece)

    def part(self, name: str, start: int, length: int) -> bytes:
        """Returns bytes of an object. Raises FileNotFoundError if it is missing."""
        with self._explained(name):
            return bytes(self._obstore.get_range(self._store, name, start=start, length=length))

    def sha256(self, name: str) -> tuple[int, str]:
        """Returns an object's size and SHA-256. Raises FileNotFoundError if it is missing."""
        digest, size = hashlib.sha256(), 0
        for piece in self.pieces(name):
            digest.update(piece)
            size += len(piece)
        return size, digest.hexdigest()

    def download(self, name: str, target: Path) -> str:
        """Writes an object to a file, whole or not at all; returns its ETag."""
        with self._explained(name), whole(target) as part, part.open("wb") as file:
            found = self._obstore.get(self._store, name)
            for piece in found.stream(_CHUNK_BYTES):
                file.write(piece)
            return found.meta["e_tag"] or ""

    def put(self, name: str, source: Path | bytes) -> str:
        """Writes an object, whole or not at all; returns its ETag."""
        with self._explained(name, creating=True):
            found = self._obstore.put(self._store, name, source, chunk_size=_CHUNK_BYTES)
            return found["e_tag"] or ""

    def put_if(self, name: str, content: bytes, version: Version | None) -> Version:
        """Writes an object if it still has `version`; returns its new version.

        Raises:
            Changed: It has another version, or exists although `version` is None.
        """
        mode: Any = "create" if version is None else dict(version)
        with self._explained(name, creating=True):
            return self._obstore.put(self._store, name, content, mode=mode, use_multipart=False)

    def delete(self, *names: str) -> None:
        """Removes objects, skipping missing ones."""
        for name in names:
            with self._explained(name), contextlib.suppress(FileNotFoundError):
                self._obstore.delete(self._store, name)

    @contextlib.contextmanager
    def _explained(self, name: str = "", *, creating: bool = False) -> Iterator[None]:
        """Turns obstore's errors into one line; with `creating`, only the bucket can be missing."""
        exceptions = self._obstore.exceptions
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise Changed(f"{self.address}/{name}") from error
        except (exceptions.BaseError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and not creating:
                raise
            raise self._problem(error) from error

    def _problem(self, error: Exception) -> Exception:
        """Returns the exception for an error, whose message mostly says what to do."""
        said, address, exceptions = one_line(error), self.address, self._obstore.exceptions
        denied = isinstance(error, exceptions.PermissionDeniedError)
        if denied or ("403 Forbidden" in said and "token request" not in said):
            if "scope" in said:
                return InputError(
                    f"{address}: the machine's access scope is too small: create it with the "
                    f"scope cloud-platform ({said})"
                )
            who = re.search(r"([\w.+-]+@\S+) does not have", said)
            right = re.search(r"storage\.\w+\.\w+", said)
            return InputError(
                f"{address}: {who[1] if who else 'this account'} lacks "
                f"{right[0] if right else 'a right'}: grant it {self.role} on gs://{self._bucket} "
                "(gcloud storage buckets add-iam-policy-binding)"
            )
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in said:
            return InputError(
                f"{address}: no bucket {self._bucket}: correct the name, or make it "
                f"(gcloud storage buckets create gs://{self._bucket} --location=REGION)"
            )
        unknown = isinstance(error, exceptions.UnauthenticatedError)
        if unknown or "token request" in said or "credential" in said.lower():
            return InputError(
                f"{address}: no valid credentials: gcloud auth application-default login, or a "
                f"machine with a service account ({said})"
            )
        return Unreachable(f"{address}: cannot be reached ({said})")


def one_line(error: BaseException) -> str:
    """Returns an error's message in one line, without obstore's notes for its authors."""
    said = str(error).partition("Debug source:")[0]
    return " ".join(said.split()) or type(error).__name__
