"""The command line before a command runs: help that is light, arguments that are wrong."""

import shlex
import subprocess
import sys

import pytest

from m4 import config
from m4.cli.arguments import COMMANDS, DATA_COMMANDS, parse
from tests.command_line import TINY, m4


def test_help_is_light() -> None:
    """Neither the list of commands nor the help of any of them imports a heavy library."""
    typed = [[], *([name] for name in COMMANDS), *(["data", name] for name in DATA_COMMANDS)]
    code = (
        "import sys, m4.__main__ as m\n"
        f"for words in {typed}:\n"
        "    try: m.main([*words, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "print({'jax', 'tensorflow', 'seqio', 'numpy', 'gin', 'rich'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "set()"
    assert said.stdout.count("usage: ") == len(typed)


def test_wrong_arguments_are_argparse_s(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["trian"], ["translate", "hello"], ["data"], []):
        with pytest.raises(SystemExit) as end:
            parse(arguments)
        assert end.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["infer", "--gin_file=demo.gin"], "m4: infer: m4's name is `m4 decode`"),
        (["train", "--run_mode=eval"], "m4: --run_mode: the command is the first word: train"),
        (["watch", "runs/a", "--gin.TRAIN_STEPS=2"], "m4: 'TRAIN_STEPS = 2': m4 watch reads no"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str) -> None:
    assert m4(*arguments).mistake.startswith(said)


def test_flags_may_have_hyphens_and_settings_are_bindings() -> None:
    arguments = parse(["train", "--model-dir=runs/a-b", "--gin.TRAIN_STEPS=2"])
    assert arguments.model_dir == "runs/a-b"
    assert arguments.gin_bindings == ["TRAIN_STEPS = 2"]
    assert parse(["data", "preview"]).command == "data preview"


@pytest.mark.parametrize(
    "command",
    [
        "eval", "decode", "score", "baselines", "train", "average", "demo", "plan", "data preview",
        "data prepare", "data vocabulary", "data cleaning_report", "data batch --step=1",
    ],
)  # fmt: skip
def test_a_run_is_the_first_argument(command: str) -> None:
    words = command.split()
    for more in (["runs/a"], ["--model_dir=runs/a"], ["--debug", "runs/a"]):
        assert parse([*words, *more]).model_dir == "runs/a"
    both = m4(*words, "runs/a", "--model_dir=runs/b").mistake
    assert "runs/b: runs/a is the run already; give one of them" in both
    with pytest.raises(SystemExit):
        parse([*words, "runs/a", "--debug", "runs/b"])


@pytest.mark.parametrize(
    "words",
    [
        ["runs/a", "--to=gl", "x y", "z"],
        ["--to", "gl", "runs/a", "x y", "z"],
        ["runs/a", "x y", "--to=gl", "z"],
        ["runs/a", "x y", "z", "--to=gl"],
    ],
)
def test_a_run_and_texts_stand_before_or_behind_flags(words: list[str]) -> None:
    assert parse(["translate", *words]).text == ["runs/a", "x y", "z"]
    with pytest.raises(SystemExit):
        parse(["translate", *words, "--no_such_flag"])


@pytest.mark.parametrize(
    ("given", "quoted"),
    [
        ("experiment.Data.about=my text", '''--gin.experiment.Data.about="'my text'"'''),
        (
            "corpus.CorpusSpec.languages=[gl, es]",
            '''--gin.corpus.CorpusSpec.languages="['gl', 'es']"''',
        ),
    ],
)
def test_text_without_quotes_is_shown_with_them(given: str, quoted: str) -> None:
    said = m4("train", f"--gin_file={TINY}", "--model_dir=x", "--dry_run", f"--gin.{given}").mistake
    assert said.endswith(f"the value cannot be read; text needs quotes; in a shell: {quoted}")
    (word,) = shlex.split(quoted)
    name, _, value = word.removeprefix("--gin.").partition("=")
    config.load([TINY], ["MODEL_DIR = 'x'", f"{name} = {value}"]).experiment()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("moe.MoeLayer.gate=top2_gshard", "--gin.moe.MoeLayer.gate=@top2_gshard.top2_gshard"),
        ("moe.MoeLayer.gate=@top2_gshard", "; did you mean @top2_gshard.top2_gshard?"),
        ("transformer.Transformer.moe=none", "--gin.transformer.Transformer.moe=None"),
        ("transformer.Transformer.layers=6", "encoder_layers or decoder_layers or scan_layers?"),
    ],
)
def test_what_was_meant_is_said(given: str, said: str) -> None:
    found = m4("train", "--gin_file=gin_configs/demo.gin", "--dry_run", f"--gin.{given}")
    assert found.mistake.endswith(said)
