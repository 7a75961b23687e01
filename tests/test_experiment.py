"""The corpus of an experiment: opened, made, made anew, refused."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from m4.data import cache
from m4.data.cache import Cache
from m4.experiment import Setup, corpus
from tests.data.corpus import Made


def prepared(folder: Path, pairs: int = 40, vocabulary_size: int = 400) -> Cache:
    source = Made({"gl": pairs})
    made = functools.partial(cache.prepare, source=source, vocabulary_size=vocabulary_size)
    return corpus(Setup(str(folder), total_steps=1, corpus=made))


def test_a_corpus_is_made_anew_until_something_is_trained_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepared(tmp_path)
    assert first.replaced is None
    assert "made anew" not in capsys.readouterr().out
    before = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    assert prepared(tmp_path).fingerprint == first.fingerprint
    assert (tmp_path / "data" / "manifest.json").stat().st_mtime_ns == before  # only opened
    assert capsys.readouterr() == ("", "")
    other = prepared(tmp_path, pairs=41)
    assert other.fingerprint != first.fingerprint
    assert f"made anew: {tmp_path}/data: this cache was made with" in capsys.readouterr().out
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="vocabulary_size = 400, now 380"):
        prepared(tmp_path, pairs=41, vocabulary_size=380)
    assert Cache(tmp_path / "data").fingerprint == other.fingerprint
