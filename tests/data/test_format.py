"""A cache's files are pinned beside its format: who changes them raises FORMAT."""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from m4.data import cache
from m4.data.clean import Cleaning
from m4.data.cleaning.script import Script
from tests.data.corpus import Made

# Format, version of SentencePiece, which trains the vocabulary, and what `digest` then gives.
PINNED = (6, "0.2.3", "d3c1eb691572039cd0efaa52a6fce718a22fe80fabb06ee7f8d01d27b71a5a9d")


def digest(folder: Path) -> str:
    """SHA-256 of the names and bytes of all arrays, texts and vocabularies."""
    files = [*folder.rglob("*.npy"), *folder.rglob("*.tsv"), *folder.rglob("*.model")]
    assert len(files) > 10
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        total.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def test_the_format_is_raised_with_every_change_of_the_files(tmp_path: Path) -> None:
    made = cache.prepare(
        tmp_path / "c",
        Made({"gl": 80, "sr_Latn": 30, "pt_BR": 20}),
        vocabulary_size=400,
        source_length=64,
        target_length=64,
        segmentations=2,
        cleaning=Cleaning((*cache.clean.DEFAULT.stages, Script())),
        workers=1,
    )
    number, trainer, pinned = PINNED
    if version("sentencepiece") != trainer:
        pytest.skip(f"needs sentencepiece {trainer}: another one may train another vocabulary")
    assert (cache.FORMAT, digest(made.folder)) == (number, pinned), (
        "the same settings give other files: raise FORMAT in m4/data/cache.py and pin anew"
    )


def test_it_is_pinned_for_the_sentencepiece_of_the_lock() -> None:
    lock = Path(__file__).parents[2] / "requirements.lock"
    # Else the test above would be skipped everywhere.
    found = re.search(r"^sentencepiece==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert found[1] == PINNED[1], "the lock has another SentencePiece: pin anew with it"
