"""The command line before a job is known: help that is light, arguments that are wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from m4.cli.arguments import parser, split_arguments
from tests.command_line import m4


@pytest.mark.parametrize("arguments", [["--help"], ["translate", "--help"]])
def test_help_is_light(arguments: list[str]) -> None:
    code = (
        "import sys, m4.__main__ as m\n"
        "try: m.main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print({'jax', 'tensorflow', 'seqio', 'numpy', 'gin'} & set(sys.modules))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines()[-1] == "set()"
    assert "usage: m4" in said.stdout


def test_wrong_arguments_are_argparse_s(capsys: pytest.CaptureFixture[str]) -> None:
    from m4.cli.main import main

    for arguments in (["trian"], ["translate", "hello"], []):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["infer", "--gin_file=demo.gin"], "m4: infer: m4's name is m4 decode"),
        (["train", "--run_mode=eval"], "m4: --run_mode: the job is the first word: m4 train, m4"),
    ],
)
def test_t5xs_words_point_to_those_of_m4(arguments: list[str], said: str) -> None:
    assert m4(*arguments).mistake.startswith(said)


def test_flags_may_have_hyphens_and_any_setting_is_in_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    others, bindings = split_arguments(["train", "--model-dir=runs/a-b", "--gin.TRAIN_STEPS=2"])
    assert parser().parse_args(others).model_dir == "runs/a-b"
    assert bindings == ["TRAIN_STEPS = 2"]
    with pytest.raises(SystemExit):
        parser().parse_args(["train", "--help"])
    assert "--gin.NAME=VALUE" in capsys.readouterr().out
