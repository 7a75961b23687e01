"""The folder of compiled programs."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import zstandard
from jax._src import compilation_cache as programs
from jax.experimental.compilation_cache import compilation_cache

from m4.parallel.platform import jax_setup
from m4.parallel.platform.jax_setup import set_up

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_enable_xla_caches",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = {name: jax.config.values[name] for name in NAMES}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def cache_used(folder: Path) -> Path:
    set_up(folder)
    return Path(jax.config.values["jax_compilation_cache_dir"])


def test_compilation_cache_is_private(tmp_path: Path) -> None:
    before = os.umask(0o002)  # folders are made writable for the group
    try:
        assert cache_used(tmp_path / "run" / "cache") == tmp_path / "run" / "cache"
    finally:
        os.umask(before)
    assert (tmp_path / "run" / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "another"), [(0o770, False), (0o707, False), (0o700, True)])
def test_cache_that_others_made_or_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, another: bool
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    if another:
        monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "cache").stat().st_uid + 1)
    assert cache_used(tmp_path / "cache") == tmp_path / "home" / "m4" / "compilation_cache"


def test_cache_that_is_set_stays(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert cache_used(tmp_path / "cache") == tmp_path / "mine"


def test_key_of_a_program_does_not_hold_the_folder(tmp_path: Path) -> None:
    """A folder that was copied, or is another machine's, has the programs that are needed."""
    names = []
    for number in range(2):
        jax.config.update("jax_compilation_cache_dir", None)
        folder = cache_used(tmp_path / str(number) / "cache")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        jax.clear_caches()
        try:
            jax.jit(lambda x: 3 * x + 1)(np.float32(2)).block_until_ready()
        finally:
            compilation_cache.reset_cache()
        names.append({path.name for path in folder.iterdir() if path.name.endswith("-cache")})
    assert names[0] == names[1] != set()


def test_a_flipped_bit_in_a_kept_program_is_an_error(tmp_path: Path) -> None:
    set_up(tmp_path)
    program, draw = bytes(range(256)) * 64 + os.urandom(1000), random.Random(1)
    kept = programs.compress_executable(program)
    assert programs.decompress_executable(kept) == program
    used = 0
    for bit in draw.sample(range(8 * len(kept)), 300):
        damaged = bytearray(kept)
        damaged[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(zstandard.ZstdError):
            assert programs.decompress_executable(bytes(damaged)) == program
            used += 1
    assert used < 10  # bits of the header that are of no consequence


def test_the_newest_programs_are_kept_up_to_a_size(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "older", "oldest")):
        (tmp_path / f"{name}-cache").write_bytes(bytes(100))
        os.utime(tmp_path / f"{name}-cache", (10**9 - age, 10**9 - age))
    (tmp_path / "mine.txt").write_bytes(bytes(100))
    jax_setup._trim(tmp_path, 200)
    assert {path.name for path in tmp_path.iterdir()} == {"new-cache", "older-cache", "mine.txt"}
