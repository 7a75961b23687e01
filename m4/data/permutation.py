"""Keyed random numbers and permutations without state: a number in, a number out."""

import hashlib

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_ROUNDS = 4


def key(*parts: int | str) -> int:
    """Returns a 64-bit key from a seed, names and numbers, the same on every machine."""
    kinds = ("str" if isinstance(part, str) else type(part).__name__ for part in parts)
    text = "\x1f".join(f"{kind}:{part}" for kind, part in zip(kinds, parts, strict=True))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio


def mix(x: U64) -> U64:
    """Maps 64 bits to 64 bits, one to one. Steele et al. 2014, splitmix64's output function.

    It takes an array or one number, and is also compiled. It never changes: corpora and batches
    depend on it.
    """
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: U64, size: U64, keys: U64) -> U64:
    """Permutes index[i] within [0, size[i]) under keys[i]; all three have one shape.

    A Feistel network of 4 rounds over the fewest bits that hold size - 1, walked until it lands in
    the range (fewer than 2 walks on average).
    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 4 and 5.
    `numba_loops.permute` is the same for one number, compiled.
    """
    assert index.shape == size.shape == keys.shape
    bits = np.maximum(_bit_length(size - np.uint64(1)), np.uint64(2))
    result = _feistel(index, bits, keys)
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = _feistel(result[outside], bits[outside], keys[outside])
    return result


def permutation(size: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns a permutation of range(size): the order of keyed random numbers."""
    numbers = mix(mix(np.arange(size, dtype=np.uint64)) ^ np.full(size, seed, np.uint64))
    return np.argsort(numbers)  # all different: any kind of sorting gives the same


def _bit_length(x: U64) -> U64:
    bits = np.zeros_like(x)
    for shift in (32, 16, 8, 4, 2, 1):
        wide = x >= np.uint64(1) << np.uint64(shift)
        bits += np.where(wide, np.uint64(shift), np.uint64(0))
        x = np.where(wide, x >> np.uint64(shift), x)
    return bits + x  # x is 0 or 1 now


def _feistel(x: U64, bits: U64, keys: U64) -> U64:
    right_bits = bits >> np.uint64(1)
    left_bits = bits - right_bits
    one = np.uint64(1)
    for number in range(_ROUNDS):
        # The halves of an odd number of bits change places: an even number of rounds puts
        # them back, and every round is a bijection.
        left, right = x >> right_bits, x & ((one << right_bits) - one)
        noise = mix(mix(right + (np.uint64(number) << np.uint64(56))) ^ keys)
        left = left ^ (noise & ((one << left_bits) - one))
        x = (right << left_bits) | left
        left_bits, right_bits = right_bits, left_bits
    return x
