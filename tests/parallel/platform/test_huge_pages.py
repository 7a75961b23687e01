"""The request for huge pages: made once, where it helps, and the program is the same one after."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m4.parallel.platform import hardware, huge_pages


@pytest.mark.parametrize(
    ("text", "platforms", "result"),
    [
        ("always [madvise] never", "cpu", True),
        ("[always] madvise never", "tpu,cpu", True),
        ("always madvise [never]", "cpu", False),
        (None, "cpu", False),
        # A GPU computes.
        ("always [madvise] never", "", False),
        ("always [madvise] never", "cuda", False),
    ],
)
def test_requested_where_the_kernel_has_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, platforms: str, result: bool
) -> None:
    monkeypatch.delenv(huge_pages.TUNABLES, raising=False)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(hardware, "gpu_plugin", lambda: "xla_cuda12")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    assert huge_pages.wanted(tmp_path / "enabled") is result
    monkeypatch.setenv(huge_pages.TUNABLES, "")  # the user has chosen
    assert not huge_pages.wanted(tmp_path / "enabled")


def test_restarts_once_with_its_arguments() -> None:
    program = (
        "import os, sys; from m4.parallel.platform import huge_pages\n"
        "print('start', flush=True)\n"
        "huge_pages.wanted = lambda: huge_pages.TUNABLES not in os.environ\n"
        "huge_pages.restart_with_huge_pages()\n"
        "print(sys.argv[1:], os.environ['GLIBC_TUNABLES'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != huge_pages.TUNABLES}
    message = subprocess.run(
        [sys.executable, "-c", program, "a b", "--c"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert message.stdout.split("\n") == [
        "start",
        "start",
        "['a b', '--c'] " + huge_pages.request(),
        "",
    ]


@pytest.mark.parametrize(("cores", "kept"), [(8, True), (9, False)])
def test_many_cpus_have_more_than_one_heap(
    monkeypatch: pytest.MonkeyPatch, cores: int, kept: bool
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert huge_pages.request().startswith(huge_pages.HUGE)
    assert (huge_pages.KEPT in huge_pages.request()) is kept
