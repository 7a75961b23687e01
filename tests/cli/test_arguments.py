"""The command line before a job is known: help that is light, arguments that are wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
