"""The corpus of the tests of training."""

import pytest

from m4.data.cache.cache import Cache
from tests.shared import small_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Returns the small corpus; read-only."""
    return small_corpus(tmp_path_factory)
