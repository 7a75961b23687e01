"""The request for huge pages, made once and where it helps; the digest of the code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m4.parallel.platform import hardware


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
    monkeypatch.delenv(hardware.TUNABLES, raising=False)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(hardware, "gpu_plugin", lambda: "xla_cuda12")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    assert hardware.huge_pages_wanted(tmp_path / "enabled") is result
    monkeypatch.setenv(hardware.TUNABLES, "")  # the user has chosen
    assert not hardware.huge_pages_wanted(tmp_path / "enabled")


def test_restarts_once_with_its_arguments() -> None:
    program = (
        "import os, sys; from m4.parallel.platform import hardware\n"
        "print('start', flush=True)\n"
        "hardware.huge_pages_wanted = lambda: hardware.TUNABLES not in os.environ\n"
        "hardware.restart_with_huge_pages()\n"
        "print(sys.argv[1:], os.environ['GLIBC_TUNABLES'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != hardware.TUNABLES}
    words = [sys.executable, "-c", program, "a b", "--c"]
    printed = subprocess.check_output(words, env=environment, text=True)
    assert printed == f"start\nstart\n['a b', '--c'] {hardware.huge_pages_request()}\n"


def test_code_digest_changes_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    one, two = tmp_path / "a.py", tmp_path / "train" / "b.txt"
    one.write_text("x = 1\n")
    two.write_text("y = 2\n")
    first = hardware.code_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-312.pyc").write_bytes(b"compiled")
    assert hardware.code_digest(tmp_path) == first
    two.write_text("y = 3\n")
    changed = hardware.code_digest(tmp_path)
    two.write_text("y = 2\n")
    assert hardware.code_digest(tmp_path) == first != changed
    two.rename(tmp_path / "b.txt")  # the same text elsewhere is other code
    assert hardware.code_digest(tmp_path) != first
