"""Shards of a corpus that is prepared in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from m4.settings import InputError
from tests.bucket import Emulator
from tests.data.test_beam import Shuffled, corpus, files_of, spec


def test_shards_in_a_bucket(tmp_path: Path, address: str, emulator: Emulator) -> None:
    source = corpus(tmp_path / "text", 100)
    work = Shuffled("direct", [], 1)
    work.open(address)
    many = spec(source).build(tmp_path / "many", engine=work)
    assert files_of(many.folder) == files_of(spec(source).build(tmp_path / "one").folder)
    folder = address.split("/", 3)[3]
    assert emulator.names(folder)
    work.work.remove()
    assert not emulator.names(folder)
    emulator.rights.remove("storage.objects.create")
    with pytest.raises(InputError, match=r" lacks storage\.objects\.create: grant it"):
        work.open(address)
