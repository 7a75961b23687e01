"""Fixtures of tests of m4.data."""

import os
from pathlib import Path

import pytest

from m4.data.cache import cache
from m4.data.corpus import CorpusSpec
from tests.data.corpus import Made

# A folder of real sentences, <language>.{train,dev,test}.tsv. They are no part of the repository.
TATOEBA = Path(
    os.environ.get("M4_TATOEBA") or Path(__file__).parents[3] / "shared" / "data" / "tatoeba"
)


@pytest.fixture(scope="session")
def made() -> Made:
    return Made({"gl": 300, "pt": 90, "sr_Latn": 31})


@pytest.fixture(scope="session")
def made_cache(made: Made, tmp_path_factory: pytest.TempPathFactory) -> cache.Cache:
    """Returns a read-only corpus; tests that write prepare their own."""
    folder = tmp_path_factory.mktemp("made") / "cache"
    return CorpusSpec(
        made, made.language_pairs(), vocabulary_size=500, lengths={"inputs": 96, "targets": 96}
    ).build(folder)


@pytest.fixture(scope="session")
def tatoeba() -> Path:
    """Returns the folder of real sentences, or skips the test without them."""
    if not TATOEBA.is_dir():
        pytest.skip(f"no sentences in {TATOEBA}; M4_TATOEBA names another folder")
    return TATOEBA
