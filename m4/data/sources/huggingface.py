"""Files of Hugging Face's datasets: Parquet, and Arrow from `save_to_disk` or the cache.

pyarrow reads them; neither the library `datasets` nor the network is needed.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as parquet

from m4.data.sources.jsonl import RecordFolder
from m4.data.sources.reading.files import seekable
from m4.data.sources.reading.folder import File
from m4.data.sources.reading.lines import Reason, Tally
from m4.settings import InputError, checked

_BATCH_ROWS = 1000
# An Arrow stream ends with a continuation and an empty message.
_END = b"\xff\xff\xff\xff\0\0\0\0"


@checked
@dataclass(eq=False)
class HuggingFace(RecordFolder):
    """Sentence pairs from Arrow files (stream or file format) or Parquet.

    The default is the hub's layout of a dataset with a configuration per pair, and a column
    `translation`: {"en": ..., "gl": ...}. The first part of a field (`RecordFolder`) is a column.
    """

    files: str = "{pair}/{split}-*.parquet"
    unit: ClassVar[str] = "row"

    def __post_init__(self) -> None:
        if self.splits is None:  # the names of Hugging Face's own splits
            self.splits = {"train": "train", "dev": "validation", "test": "test"}
        super().__post_init__()

    def _choose(self, files: list[File]) -> list[File]:
        """Returns the files. InputError: a part such as train-00000-of-00002 is missing."""
        shards: dict[tuple[str, int], set[int]] = {}
        for file in files:
            if match := re.search(r"-(\d{5})-of-(\d{5})(?=\.)", file.name):
                stem = file.name[: match.start()]
                shards.setdefault((stem, int(match[2])), set()).add(int(match[1]))
        for (stem, number), there in shards.items():
            if missing := set(range(number)) - there:
                first = f"{self.folder}/{stem}-{min(missing):05d}-of-{number:05d}..."
                raise InputError(f"{first}: missing, with {len(missing) - 1} more")
        return files

    def _records(self, file: File, tally: Tally) -> Iterator[dict[str, Any] | Reason]:
        with seekable(file.path) as stream:
            try:
                names, batches = _open(stream)
                wanted = self._columns(names, file.codes)
                if missing := [name for name in wanted if name not in names]:
                    said = f"no column {missing[0]!r}; it has {', '.join(names)}"
                    settings = f"({self.owner}.translation_field, english_field, language_field)"
                    raise InputError(f"{file.path}: {said} {settings}")
                for batch in batches(wanted):
                    yield from _rows(batch)
            except (pa.ArrowException, OSError) as error:
                said = f"damaged, or not Arrow or Parquet: {str(error).splitlines()[0]}"
                raise InputError(f"{file.path}: {said}") from error


def _open(stream: IO[bytes]) -> tuple[list[str], Callable[[list[str]], Iterator[Any]]]:
    """Returns a file's columns, and a function that reads some of them, batch by batch."""
    start = stream.read(6)
    stream.seek(0)
    if start.startswith(b"PAR1"):
        table = parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        return names, lambda columns: table.iter_batches(_BATCH_ROWS, columns=columns)
    if start == b"ARROW1":
        reader = pa.ipc.open_file(stream)
        return reader.schema.names, lambda columns: (
            reader.get_batch(number).select(columns) for number in range(reader.num_record_batches)
        )
    # A stream without its end can be read up to the cut.
    stream.seek(-min(stream.seek(0, os.SEEK_END), len(_END)), os.SEEK_END)
    if stream.read() != _END:
        raise OSError("it ends in the middle")
    stream.seek(0)
    reader = pa.ipc.open_stream(stream)
    return reader.schema.names, lambda columns: (batch.select(columns) for batch in reader)


def _rows(batch: Any) -> Iterator[dict[str, Any] | Reason]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # the fault is in one of the rows, none of which was yielded yet
        for row in range(batch.num_rows):
            try:
                yield from batch.slice(row, 1).to_pylist()
            except UnicodeDecodeError:
                yield Reason("not UTF-8")
