"""Searches that were traced before: the same translations, and never those of something else."""

from __future__ import annotations

import functools
import os
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from m4.eval.decoding import decode as decoding
from m4.eval.decoding import traced
from m4.eval.decoding.decode import translations
from m4.eval.decoding.methods.sampling import Sampling
from m4.eval.decoding.settings import BEST
from m4.model.gates.topk import topk
from m4.model.routing import Gate
from m4.model.transformer import Transformer
from tests.eval.small_model import MOE, SETTINGS, Words, sentences, tiny

MODEL, PARAMS = tiny()
TEXTS = sentences(3)


def digest(model=MODEL, static: tuple = (10, 2, 0.6, BEST, True), rows: int = 4) -> str:
    return traced._digest(model, static, (PARAMS, np.ones((rows, 16), np.int32), {}))


def with_gate(gate: Gate) -> Transformer:
    return MODEL.clone(moe=functools.partial(MOE, gate=gate))


def test_a_process_that_does_not_trace_translates_as_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = translations(MODEL, PARAMS, Words(), TEXTS, SETTINGS)
    assert translations(MODEL, PARAMS, Words(), TEXTS, SETTINGS, programs=tmp_path) == plain
    (kept,) = tmp_path.iterdir()
    monkeypatch.setattr(traced, "_programs", {})  # as in another process
    with monkeypatch.context() as other:
        other.setattr(traced.export, "export", None)
        assert translations(MODEL, PARAMS, Words(), TEXTS, SETTINGS, programs=tmp_path) == plain
    # A damaged one is traced again.
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)
    assert traced._read(kept) is None


def test_sampling_is_traced_by_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(traced, "search", lambda *arguments, **options: asked.append(options))
    method = replace(SETTINGS, sampling=Sampling()).method()
    tokens_BL = np.ones((4, 16), np.int32)
    traced.traced_search(tmp_path, MODEL, PARAMS, tokens_BL, 10, 2, 0.6, method, {}, grows=True)
    assert asked == [{"grows": True}]
    assert not [*tmp_path.iterdir()]


def test_what_decides_a_search_decides_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digest() == digest()
    others = [
        digest(),
        digest(rows=8),
        digest(static=(10, 2, 0.7, BEST, True)),
        digest(static=(10, 2, 0.6, BEST._replace(min_length=2), True)),
        digest(MODEL.clone(dropout_rate=0.2)),
        digest(with_gate(functools.partial(topk, choices=1))),
        digest(with_gate(functools.partial(topk, choices=2))),
    ]
    # A file of the user's own, as it is and changed.
    mine = types.ModuleType("mine")
    mine.__file__ = str(tmp_path / "mine.py")
    monkeypatch.setitem(sys.modules, "mine", mine)
    for text in ("a = 1", "a = 2"):
        (tmp_path / "mine.py").write_text(text)
        os.utime(tmp_path / "mine.py", ns=(0, len(others)))
        traced._files.cache_clear()  # as in another process
        others.append(digest())
    assert len({digest(), *others}) == len(others)


def test_what_has_no_name_has_no_digest() -> None:
    with pytest.raises(traced._Unknown):
        traced._of(lambda: None)
    with pytest.raises(traced._Unknown):
        traced._of(object())


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "traced_search", None)
    assert translations(MODEL, PARAMS, Words(), TEXTS[:1], SETTINGS)
