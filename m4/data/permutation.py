"""Keyed random numbers and permutations as pure functions, without state."""

import hashlib

import numpy as np

from m4.data.arrays import U64, Ints


def key(*parts: int | str) -> int:
    """Returns a 64-bit key from a seed, names and numbers, the same on every machine."""
    kinds = ("str" if isinstance(part, str) else type(part).__name__ for part in parts)
    text = "\x1f".join(f"{kind}:{part}" for kind, part in zip(kinds, parts, strict=True))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio


def mix(x: U64) -> U64:
    """Maps 64 bits to 64 bits, one to one. Steele et al. 2014, splitmix64's output function.

    It takes an array or a number, and is also compiled. It must never change, as corpora and
    batches depend on it.
    """
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(size: int, seed: int) -> Ints:
    """Returns a permutation of range(size), by the order of keyed random numbers."""
    numbers = mix(mix(np.arange(size, dtype=np.uint64)) ^ np.full(size, seed, np.uint64))
    return np.argsort(numbers)  # all are different, so any sorting algorithm gives the same
