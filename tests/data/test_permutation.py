from __future__ import annotations

import numpy as np
import pytest

from m4.data.permutation import key, mix, permutation
from m4.data.stream import numba_loops
from m4.settings import SavedText
from tests.data import stream_reference


def test_mix_is_splitmix64() -> None:
    # The first two outputs of Vigna's splitmix64.c from state 0; its state grows by the constant
    # that mix adds, so the second output is mix of that constant.
    state = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert [hex(x) for x in mix(state)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 100, 1000, 4097])
def test_permute_is_a_permutation(size: int) -> None:
    index, of = np.arange(size, dtype=np.uint64), key("k", size)
    places = numba_loops.permute_each(index, np.uint64(size), np.uint64(of))
    assert sorted(places) == list(range(size))
    assert sorted(permutation(size, of)) == list(range(size))


def test_text_of_a_saved_config_gives_the_same_key() -> None:
    assert key("vocabulary", SavedText("es")) == key("vocabulary", "es") != key("vocabulary", 3)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 2**33 + 1, 2**62])
def test_compiled_is_the_same(size: int) -> None:
    index = np.unique(np.linspace(0, size - 1, 50).astype(np.uint64))
    keys = mix(np.arange(len(index), dtype=np.uint64))
    wanted = [stream_reference.mix(int(k)) for k in keys]
    assert [int(numba_loops.mix(k)) for k in keys] == mix(keys).tolist() == wanted
    for i, k in zip(index, keys, strict=True):
        place = int(numba_loops.permute(i, np.uint64(size), k))
        assert place == stream_reference.permute(int(i), size, int(k))


def test_keys_differ_and_stay() -> None:
    assert len({key(1), key("1"), key(1, 1), key(11), key("a", 1), key("a1")}) == 6
    # Frozen: a checkpoint's stream must be the same stream in the next version.
    assert key("epoch", 0, "en-gl") == 11644592413519607977


def test_every_place_is_as_likely() -> None:
    # 2,000 keys, range of 10: where 0 goes is a multinomial; chi-square with 9 degrees of freedom
    # is below 27.9 with probability 0.999.
    keys = mix(np.arange(2000, dtype=np.uint64))
    places = [int(numba_loops.permute(np.uint64(0), np.uint64(10), k)) for k in keys]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
