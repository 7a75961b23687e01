"""Every kind of annotation allows what it says and refuses the rest, by the parameter's name."""

import dataclasses
import os
import pathlib
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Optional

import flax.linen as nn
import pytest

from m4 import settings
from m4.settings import MUTABLE, Between, OneOf, SettingError, Size, checked

CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (int, [0, -1, 10**12], ["x", 1.0, True, None, ""]),
    (float, [0, 1.5, float("inf")], ["x", None, True, float("nan"), ""]),
    (bool, [True], [1, None, "True"]),
    (str, ["x"], ["", 1, None]),
    (int | None, [None, 3], ["x", 1.5]),
    (Annotated[int, Between(1, 4)], [1, 4], [0, 5, 2.0, "x"]),
    (Annotated[float, Between(0, 1, below=True)], [0, 0.9], [1.0, -0.1]),
    (Annotated[float, Between(0, above=True)], [1e-9], [0, -1]),
    (Optional[Annotated[int, Between(1)]], [None, 1], [0]),  # noqa: UP045 (pyright)
    (Annotated[str, OneOf(("a", "b"))], ["a"], ["c", "", None]),
    (Literal["a", 2], ["a", 2], ["b", None]),
    (Sequence[int], [[1, 2], (3,), []], ["x", 1, ["x"], None]),
    (tuple[str, ...], [("a",)], ["a", (1,), None]),
    (Mapping[str, Size], [{"a": 1}, {}], [{"a": 0}, {1: 1}, 3, None, [1]]),
    (str | os.PathLike[str], ["x", pathlib.Path()], ["", 0, None]),
    (Callable[..., Any], [len], [3, "x", None, []]),
    (Any, [None, object()], []),
]


@pytest.mark.parametrize(("annotation", "good", "bad"), CASES, ids=[str(case[0]) for case in CASES])
def test_what_an_annotation_allows(annotation: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        settings.check_value("f.x", value, annotation)
    for value in bad:
        with pytest.raises(SettingError) as raised:
            settings.check_value("f.x", value, annotation)
        assert str(raised.value) == f"f.x = {value!r}: must be {settings.describe(annotation)}"


@checked
def rate(step: int, peak: Annotated[float, Between(0, 10)], warmup: Size = 1) -> float:
    return peak * step / warmup


@checked
@dataclasses.dataclass(frozen=True)
class Plain:
    size: Size
    name: Annotated[str, MUTABLE] = "a"


@checked
@dataclasses.dataclass(frozen=True)
class Adjusted:
    size: Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.size + 1)


@checked
class Layer(nn.Module):
    width: Size = 1

    def __call__(self, x: int) -> int:
        return x * self.width


def test_functions_and_classes_check_their_arguments() -> None:
    assert rate(1, 2.0) == 2.0
    with pytest.raises(SettingError, match=r"^rate.warmup = 0: must be a whole number from 1 to "):
        rate(1, peak=1, warmup=0)
    assert Plain(3).size == 3
    assert Adjusted(3).size == 4
    assert Layer(2)(3) == 6
    for made in (Plain, Adjusted, Layer):
        with pytest.raises(SettingError, match=rf"^{made.__name__}\.\w+ = 0: "):
            made(0)


def test_settings_say_themselves_whether_they_may_change() -> None:
    assert settings.mutable_of(Plain) == ["name"]
    assert not settings.mutable_of(rate)


def test_the_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(SettingError("f.x", 3, "a text")))
    assert (str(error), error.setting) == ("f.x = 3: must be a text", "f.x")


@pytest.mark.parametrize(
    ("started", "begins"),
    [
        (".venv/bin/m4", ".venv/bin/m4"),
        ("{here}/.venv/bin/m4-nmt", ".venv/bin/m4-nmt"),
        ("{here}/bin/m4", "m4"),  # on the PATH, as after activation
        ("/opt/other/bin/m4", "/opt/other/bin/m4"),
        ("{here}/m4/__main__.py", ".venv/bin/python -m m4"),
        ("", ".venv/bin/python -m m4"),
    ],
)
def test_a_command_to_paste_begins_as_the_program_was_started(
    started: str, begins: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    on_path = tmp_path / "bin" / "m4"
    on_path.parent.mkdir()
    on_path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(sys, "argv", [started.format(here=tmp_path), "eval"])
    assert settings.pasted("report", "my run") == f"{begins} report 'my run'"
