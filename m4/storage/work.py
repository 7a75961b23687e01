"""The files that the workers of a job leave for each other and for the command."""

import contextlib
import functools
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.storage.files import remove
from m4.storage.objects import Objects, is_address


class Work:
    """The files of a job in a folder or a bucket that all workers see. Each appears whole."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._objects = Objects(place) if is_address(place) else None

    @functools.cached_property
    def folder(self) -> Path:
        """The folder; of a bucket, one of this process's copies."""
        if self._objects is None:
            Path(self.place).mkdir(parents=True, exist_ok=True)
            return Path(self.place)
        folder = tempfile.mkdtemp(prefix="m4-beam-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Gives a path to write, whose file is there at the end."""
        part = self.folder / f".{os.getpid()}.{name}"
        yield part
        if self._objects is not None:
            self._objects.put(name, part)
            part.unlink()
        else:
            os.replace(part, self.folder / name)

    def write(self, name: str, content: bytes) -> None:
        with self.writing(name) as part:
            part.write_bytes(content)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """Gives the path of a file that is there; a bucket's is a copy, until the end."""
        path = self.folder / name
        if self._objects is None:
            yield path
            return
        self._objects.download(name, path)
        yield path
        path.unlink()

    def array(self, name: str, kind: npt.DTypeLike) -> npt.NDArray[Any]:
        with self.reading(name) as path:
            return np.fromfile(path, kind)

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        with self.reading(name) as path, np.load(path) as found:
            return dict(found)

    def json(self, name: str) -> Any:
        """Returns the content of a file, or None if it is not there."""
        with contextlib.suppress(FileNotFoundError), self.reading(name) as path:
            return json.loads(path.read_bytes())
        return None

    def made(self) -> set[str]:
        """Returns the names of all shards."""
        names = self._objects.list() if self._objects is not None else os.listdir(self.folder)
        return {name[:-5] for name in names if name.endswith(".json") and name[0] != "."}

    def remove(self) -> None:
        if self._objects is not None:
            self._objects.delete(*self._objects.list())
        remove(self.folder)
