from __future__ import annotations

import numpy as np
import pytest

from m4.data.permutation import key, mix, permutation, permute
from m4.data.stream import numba_loops
from m4.settings import SavedText


def test_mix_is_splitmix64() -> None:
    # The first two outputs of Vigna's splitmix64.c from state 0; its state grows by the constant
    # that mix adds, so the second output is mix of that constant.
    state = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert [hex(x) for x in mix(state)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 100, 1000, 4097])
def test_permute_is_a_permutation(size: int) -> None:
    index = np.arange(size, dtype=np.uint64)
    places = permute(index, np.full_like(index, size), np.full_like(index, key("k", size)))
    assert sorted(places) == list(range(size))
    assert sorted(permutation(size, key("k", size))) == list(range(size))


def test_text_of_a_saved_config_gives_the_same_key() -> None:
    assert key("vocabulary", SavedText("es")) == key("vocabulary", "es") != key("vocabulary", 3)


def test_permute_takes_sizes_and_keys_one_by_one() -> None:
    index = np.array([3, 3, 40], np.uint64)
    size = np.array([5, 50, 50], np.uint64)
    keys = np.array([1, 2, 2], np.uint64)
    together = permute(index, size, keys)
    alone = [int(permute(index[i : i + 1], size[i : i + 1], keys[i : i + 1])[0]) for i in range(3)]
    assert together.tolist() == alone


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 2**33 + 1, 2**62])
def test_compiled_is_the_same(size: int) -> None:
    index = np.unique(np.linspace(0, size - 1, 50).astype(np.uint64))
    keys = mix(np.arange(len(index), dtype=np.uint64))
    sizes = np.full_like(index, size)
    wanted = permute(index, sizes, keys)
    found = [numba_loops.permute(i, n, k) for i, n, k in zip(index, sizes, keys, strict=True)]
    assert [int(x) for x in found] == wanted.tolist()
    assert [int(numba_loops.mix(k)) for k in keys] == mix(keys).tolist()


def test_keys_differ_and_stay() -> None:
    assert len({key(1), key("1"), key(1, 1), key(11), key("a", 1), key("a1")}) == 6
    # Frozen: a checkpoint's stream must be the same stream in the next version.
    assert key("epoch", 0, "en-gl") == 11644592413519607977


def test_every_place_is_as_likely() -> None:
    # 2,000 keys, range of 10: where 0 goes is a multinomial; chi-square with 9 degrees of freedom
    # is below 27.9 with probability 0.999.
    keys = mix(np.arange(2000, dtype=np.uint64))
    places = permute(np.zeros(2000, np.uint64), np.full(2000, 10, np.uint64), keys)
    counts = np.bincount(places.astype(int), minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
