"""A refusal of the machine is one line and exit status 1, and nothing is printed elsewhere."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from etils import epath

from m4.data.sources.reading.files import chunks
from m4.jobs import train
from m4.settings import InputError
from m4.storage.files import check_input
from tests.command_line import m4


def _full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/runs/a/.lock.train")


def _full_below_a_library() -> None:
    try:
        _full()
    except OSError as error:
        raise ValueError("cannot write") from error


def _full_in_a_library() -> None:
    raise ValueError("RESOURCE_EXHAUSTED: [OS error 28: ENOSPC No space left on device]")


@pytest.mark.parametrize(
    ("raises", "said"),
    [
        (_full, "m4 train: /runs/a/.lock.train: No space left on device; what was written"),
        (_full_below_a_library, "m4 train: /runs/a/.lock.train: No space left on device;"),
        (_full_in_a_library, "m4 train: No space left on device (ValueError);"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, raises: Callable[[], None], said: str
) -> None:
    monkeypatch.setattr(train, "run", lambda *_: raises())
    found = m4("train")
    assert found.status == 1
    (line,) = found.err.splitlines()
    assert line.startswith(said)
    with pytest.raises((OSError, ValueError)):  # a mistake of m4's can be found
        m4("train", "--debug")


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "x")

    monkeypatch.setattr(train, "run", mistaken)
    with pytest.raises(FileNotFoundError):
        m4("train")


def test_an_argument_that_is_not_utf8_is_named() -> None:
    said = m4("translate", "--to=gl", os.fsdecode(b"a\xffb"))
    assert said.mistake == r"m4: argument 3, 'a\\xffb': not UTF-8"


# The shell closes a stream, or gives one that takes nothing.
PROGRAM = """
import sys
from m4.cli import environment
from m4.jobs import streams
streams.open_closed()
file = open(sys.argv[1], "w")
print("a warning", file=sys.stderr)
print("a result")
print(sorted(streams.closed), file.fileno() > 2, file=file)
sys.exit(environment.flushed(0, "m4 report"))
"""


@pytest.mark.parametrize(
    ("how", "closed", "out", "err", "status"),
    [
        ("2>&-", "['stderr'] True", "a result\n", "", 0),
        (">&-", "['stdout'] True", "", "a warning\n", 0),
        ("<&- >&- 2>&-", "['stderr', 'stdin', 'stdout'] True", "", "", 0),
        (
            ">/dev/full",
            "[] True",
            "",
            "a warning\nm4 report: standard output: No space left on device\n",
            1,
        ),
    ],
)
def test_closed_and_full_streams(
    tmp_path: Path, how: str, closed: str, out: str, err: str, status: int
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" "$2" {how}', sys.executable, PROGRAM, tmp_path / "file"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)
    assert (tmp_path / "file").read_text() == closed + "\n"


def test_a_job_knows_that_its_output_is_closed() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m m4 watch none --once >&-', sys.executable],
        capture_output=True,
        text=True,
    )
    said = "m4 watch: standard output is closed: what the command prints would be lost\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("place", ["FILE/x", "/proc/x", "PIPE"])
def test_an_output_that_cannot_be_written_is_one_line_before_any_work(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    place = place.replace("FILE", f"{tmp_path}/file").replace("PIPE", f"{tmp_path}/pipe")
    for words in (
        ("decode", "--input=x", "--to=gl"), ("export", "--format=t5x"), ("atlas",),
        ("checkpoint", "convert"), ("average", "--last=2"),
    ):  # fmt: skip
        said = m4(*words, "--model_dir=none", f"--output={place}").mistake
        assert f"--output={place}: " in said, words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/proc/self/mem"])
def test_an_input_that_is_no_file_is_one_line(name: str, tmp_path: Path) -> None:
    """Reading it would never end, or fail in the middle."""
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / name
    with pytest.raises(InputError, match=f"^{path}: not a file but a pipe"):
        check_input(path)
    with pytest.raises(InputError, match="not a file but a pipe"):
        next(chunks(epath.Path(path)))


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("-n 32", "Too many open files: 32 are allowed (ulimit -n), m4 needs 256"),
        ("-v 1000000", "Cannot allocate memory: 1,000,000 KiB are allowed (ulimit -v), m4 needs "),
        ("-d 1000000", "Cannot allocate memory: 1,000,000 KiB are allowed (ulimit -d), m4 needs "),
    ],
)
def test_a_machine_that_allows_too_little_is_one_line(limit: str, said: str) -> None:
    """With little memory a compiler would not say so: it hangs."""
    command = f"ulimit {limit}; exec {sys.executable} -m m4 watch none"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"m4 watch: {said}" in done.stderr
    assert done.stderr.count("\n") == 1
