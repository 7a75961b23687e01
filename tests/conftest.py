"""Sets up JAX for tests, before anything imports it."""

import gc
import itertools
import operator
import os
import re
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.xla_flags import QUICK

# Eight devices on any machine, so that sharding is tested; one is what everything else uses.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# x[B, L] + y[L] is an error: shapes are to be said, not guessed.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Programs here are tiny and many: compiling them is nearly all the time that tests take.
os.environ.setdefault("XLA_FLAGS", QUICK)
# Tracing makes many objects that stay: looking for garbage among them is a sixth of its time.
gc.set_threshold(50_000, 20, 20)
# ... so they are kept for the next run, also the smallest: of one operation outside of a jitted
# function there are hundreds, and a fifth of the time went into them. The folder may be deleted at
# any time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

# A shell starts what runs in its background with SIGINT ignored, and all its children inherit
# that: tests that interrupt a process would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with SIGHUP.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test has a time limit: a machine may be busy.
hypothesis.settings.register_profile("m4", deadline=None)
hypothesis.settings.load_profile("m4")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="I/N",
        help="the I-th, from 0, of N parts of the files, and the tests marked every_part",
    )


def pytest_xdist_auto_num_workers() -> int:
    """Returns one worker more than cores: tests of processes wait for them a sixth of the time."""
    if asked := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(asked)
    pinned = hasattr(os, "sched_getaffinity")  # not on macOS
    return 1 + (len(os.sched_getaffinity(0)) if pinned else os.cpu_count() or 1)


# Names of short tests that together take ten seconds and more.
_LONG = (
    "jobs/checkpoints/test_initial.py", "jobs/decoding/test_evaluate.py",
    "model/dispatch/test_implementations.py", "model/test_gates.py", "model/test_transformer.py",
    "train/test_initial.py", "train/test_trainer.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts slow and long files first, so that no worker ends with one."""
    if part := config.getoption("--part"):
        match = re.fullmatch(r"(\d+)/(\d+)", str(part))
        if match is None or not int(match[1]) < int(match[2]):
            raise pytest.UsageError(f"--part={part}: must be I/N, I less than N")
        here = [
            zlib.crc32(i.path.name.encode()) % int(match[2]) == int(match[1])
            or i.get_closest_marker("every_part") is not None
            for i in items
        ]
        config.hook.pytest_deselected(items=[*itertools.compress(items, map(operator.not_, here))])
        items[:] = itertools.compress(items, here)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda i: i.path not in slow and not i.path.as_posix().endswith(_LONG))


def pytest_collection_finish() -> None:
    """Freezes what is imported: a search for garbage in it takes half a second a file."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _programs_go_with_their_module() -> Iterator[None]:
    """Drops compiled programs after each file's tests, as those of all would be gigabytes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


def pytest_configure(config: pytest.Config) -> None:
    """Makes JAX compile again what a killed run left unfinished in the cache, without an error."""
    config.addinivalue_line(
        "filterwarnings", "default:Error reading persistent compilation cache entry:UserWarning"
    )
