"""Compilations in subprocesses, and their errors."""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from m4.plan import launch
from m4.settings import InputError
from tests.command_line import m4

CONFIG = Path(__file__).parents[2] / "gin_configs" / "moe_128e_12l.gin"


@pytest.fixture(autouse=True)
def _no_other_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps a test from waiting for plans that really compile on this machine."""
    monkeypatch.setattr(launch, "one_at_a_time", contextlib.nullcontext)


def compiled(patch: pytest.MonkeyPatch, run: Callable[..., object]) -> dict[str, Any]:
    """Returns the facts of a plan whose subprocess is `run`, without any compiler."""
    patch.setattr(launch.subprocess, "run", run)
    patch.setattr(launch, "check_compiler", lambda platform: None)
    return launch.compiled("a", ["--gin_file=a.gin"], "v3:8x8", "train", Console(quiet=True))


def test_environment_is_the_subprocess_alone_and_its_stderr_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    seen, said = {}, "libtpu: a warning\n"

    def run(command, env, **_):
        seen.update(env=env, command=command)
        path = Path(command[-1].removeprefix("--facts="))
        path.write_text('{"devices": 128}', encoding="utf-8")
        return subprocess.CompletedProcess(
            command, 0, "", f"I0 x] Could not find cuda drivers on it\n{said}"
        )

    assert compiled(monkeypatch, run) == {"config": "a", "devices": 128}
    assert capsys.readouterr().err == said
    assert seen["command"][1:4] == ["-m", "m4", "plan"]
    assert {name: seen["env"][name] for name in launch.ENVIRONMENT} == launch.ENVIRONMENT
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD" not in launch.os.environ


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (2, launch.InputError, "^config: no such thing$"),
        (1, RuntimeError, "status 1"),
        (0, RuntimeError, "status 0"),  # status 0, and no file
        (-11, launch.InputError, r"^SIGSEGV ended the compiler \(libtpu .*\): a fault or"),
        (-9, launch.InputError, "^SIGKILL ended the compiler .* free memory$"),
    ],
)
def test_user_mistake_is_one_line_and_a_crash_has_all_of_stderr(
    status: int, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command, **_):
        text = "a warning\nm4 plan: config: no such thing\n"
        return subprocess.CompletedProcess(command, status, "", text)

    with pytest.raises(error, match=said):
        compiled(monkeypatch, run)


def test_missing_compiler_error_names_the_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    said = m4("plan", f"--gin_file={CONFIG}", f"--output={tmp_path}")
    assert said.mistake.startswith("m4 plan: the TPU compiler is not installed: `make pod`")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    said = m4("plan", f"--gin_file={CONFIG}", f"--output={tmp_path}")
    assert said.mistake.endswith("libtpu.so: no such file")
    assert not [*tmp_path.iterdir()]


def test_the_compiling_process_reads_the_same_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved one of a run's folder, too."""
    given: list[list[str]] = []

    def compiled(config: str, arguments: list[str], *_: object) -> dict[str, object]:
        given.append([config, *arguments])
        raise InputError("seen")

    monkeypatch.setattr(launch, "compiled", compiled)
    words = [f"--gin_file={CONFIG}", "--model_dir=runs/a", "--allow_module=x"]
    for read, name in ((words, CONFIG.stem), (["--model_dir=gs://b/mine/"], "mine")):
        assert m4("plan", *read, "--gin.BATCH_SIZE=8").mistake == "m4 plan: seen"
        assert given[-1][: len(read) + 1] == [name, *read]
        assert given[-1][-1] == "--gin_bindings=BATCH_SIZE = 8"
