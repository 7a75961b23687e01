"""`import m4`: quick, typed, one way in for Python; jobs and Python leave the same folders."""

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import m4
from m4.config import ConfigError
from m4.data.corpus import CorpusSpec
from m4.experiment import changes
from m4.model.transformer import Transformer
from m4.settings import InputError
from m4.train.optimizer import adamw
from tests.command_line import ALONE, TINY
from tests.command_line import m4 as command
from tests.data.corpus import Made
from tests.documents.blocks import ROOT, blocks_of
from tests.shared import tiny_run


def ran(*words: str, **more: Any) -> str:
    """Returns the output of a program, which must succeed."""
    return subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=600, **more
    ).stdout


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, m4\n"
        "assert {'train', 'load', 'Transformer', 'MoeLayer'} <= set(dir(m4))\n"
        "print({'jax', 'numpy', 'gin', 'flax', 'tensorflow', 'matplotlib'} & set(sys.modules))\n"
        "import inspect, pydoc, m4.train.loop\n"
        "from m4.train import optimizer\n"
        "assert m4.train is sys.modules['m4.train'] and callable(m4.train.loop.train)\n"
        "asked = ['experiment', 'model_dir', 'bindings', 'init_from', 'fresh', 'log']\n"
        "assert [*inspect.signature(m4.train).parameters] == asked\n"
        "assert '  Trains an experiment' in pydoc.render_doc(m4.train)\n"
    )
    assert ran(sys.executable, "-c", code) == "set()\n"


def test_the_folder_of_a_clone_does_not_hide_the_package(tmp_path: Path) -> None:
    """A clone is called m4, too: in its parent folder it would be a namespace package."""
    (tmp_path / "m4" / "m4").mkdir(parents=True)
    shutil.copy(m4.__file__, tmp_path / "m4" / "m4")
    for words in (["-c", "import m4; print('m4', m4.__version__)"], ["-m", "m4", "--version"]):
        assert ran(sys.executable, *words, cwd=tmp_path).startswith(f"m4 {m4.__version__}")


def test_every_public_name_is_there_and_documented() -> None:
    for name in m4.__all__:
        found = getattr(m4, name)
        assert name == "__version__" or found.__doc__, name
    assert (Path(m4.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        m4.trian  # type: ignore[attr-defined]  # noqa: B018


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> m4.Run:
    data = f"experiment.Data.data_dir = '{tiny_run(tmp_path_factory)}/data'"  # not built again
    folder = tmp_path_factory.mktemp("front") / "run"
    return m4.train(TINY, model_dir=folder, bindings=[data])


@pytest.mark.slow
def test_a_run_trains_loads_and_translates(run: m4.Run) -> None:
    assert [row["step"] for row in run.metrics if "loss" in row] == [2, 4]
    again = m4.load(run.folder)
    assert again.experiment.training.total_steps == 4
    said = [one.translate(["tres días", "", "dous"], to="en") for one in (run, again)]
    assert said[0] == said[1]
    assert len(said[0]) == 3
    assert said[0][1] == ""
    sizes = jax.tree.map(np.shape, run.params)
    assert sizes["token_embedder"]["embedding"][1] == 16
    jax.tree.map(np.testing.assert_array_equal, run.params, again.params)
    with pytest.raises(ValueError, match="does not translate into"):
        run.translate(["a"], to="fr")


@pytest.mark.slow
def test_a_run_explains_a_sentence(run: m4.Run) -> None:
    found = run.explain("tres días", to="en")
    assert found.text == run.translate(["tres días"], to="en")[0]
    assert (found.source[0], found.source[-1]) == ("▁<2en>", "</s>")
    assert "".join(found.source[1:-1]) == "▁tres▁días"
    (layer,) = [name for name in found.experts if name.startswith("encoder")]
    assert len(found.experts[layer]) == len(found.source)
    # It is printed as a line for each piece.
    lines = str(found).splitlines()
    assert lines[0] == found.text
    assert lines[1].startswith("encoder ▁<2en>  encoder_0: ")
    assert len(lines) == 1 + len(found.source) + len(found.target) + len(found.attention)
    with pytest.raises(InputError, match="does not translate into"):
        run.explain("tres días", to="fr")
    with pytest.raises(InputError, match=r"beam = 4: no setting of m4.Decoding; did you mean beam"):
        run.translate(["tres"], to="en", beam=4)
    with pytest.raises(InputError, match="lines: 3 is no line: must be text"):
        run.translate([3], to="en")  # type: ignore[list-item]


@pytest.mark.slow
def test_a_run_begins_from_another_and_says_its_metrics(run: m4.Run, tmp_path: Path) -> None:
    """Before the first step it is as good as that one at its end."""
    rows: list[dict[str, Any]] = []
    experiment = dataclasses.replace(run.experiment, model_dir=str(tmp_path / "other"))
    begun = m4.train(experiment, init_from=f"{run.folder}@4", log=rows.append)
    assert rows == begun.metrics
    (last,) = [row["dev/nll"] for row in run.metrics if row["step"] == 4 and "dev/nll" in row]
    first = next(row for row in rows if "dev/nll" in row)
    assert (first["step"], first["dev/nll"]) == (0, pytest.approx(last, rel=1e-6))


@pytest.mark.slow
def test_the_command_line_takes_up_what_python_trained(run: m4.Run) -> None:
    said = command("train", f"--model_dir={run.folder}")
    assert (said.status, said.err) == (0, "")
    assert "already at step 4, nothing to train to 4" in said.out
    assert "next: m4 eval" in said.out
    # Fewer steps than there are is no new training either.
    said = command("train", f"--model_dir={run.folder}", "--gin.TRAIN_STEPS=2")
    assert "already at step 4, nothing to train to 2" in said.out


@pytest.mark.slow
def test_a_run_is_read_in_a_fresh_interpreter(run: m4.Run) -> None:
    code = (
        "import m4, sys, json\n"
        f"run = m4.load({str(run.folder)!r})\n"
        "print(json.dumps(run.translate(['tres días'], to='en')))\n"
        "assert not {'tensorflow', 'seqio'} & set(sys.modules)\n"
    )
    said = ran(sys.executable, "-c", code, env=ALONE, cwd="/")
    assert json.loads(said) == run.translate(["tres días"], to="en")


@pytest.mark.slow
@pytest.mark.thorough
def test_an_experiment_of_plain_objects_is_a_run_too(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split, count in (("train", 60), ("dev", 8), ("test", 8)):
        lines = [f"{a}\t{b}" for a, b in Made({"gl": count}).pairs("en-gl", "train")]
        (folder / f"gl.{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    from m4.data.sources.tsv import Tsv

    experiment = m4.Experiment(
        str(tmp_path / "run"),
        m4.Data(CorpusSpec(functools.partial(Tsv, str(folder)), vocabulary_size=340)),
        m4.Training(1, 8, adamw, tensorboard=False),
        functools.partial(
            Transformer, width=16, heads=2, head_width=8, mlp_width=32, encoder_layers=1,
            decoder_layers=1, moe_every=1, moe=functools.partial(m4.MoeLayer, num_experts=2),
        ),
    )  # fmt: skip
    m4.train(experiment)
    assert changes(m4.load(tmp_path / "run").experiment, experiment) == {}
    # Another model is refused, as on the command line.
    other = dataclasses.replace(
        experiment, training=dataclasses.replace(experiment.training, seed=1)
    )
    with pytest.raises(ValueError, match="belongs to another config"):
        m4.train(other)


def test_a_corpus_for_any_trainer(tmp_path: Path) -> None:
    corpus = m4.prepare_corpus(tmp_path / "data", Made({"gl": 60, "pt": 90}), vocabulary_size=400)
    assert corpus.languages == ["en", "gl", "pt"]
    batches = corpus.batches(batch_size=4, start=3)
    first: dict[str, Any] = next(batches)
    assert first["encoder_input_tokens"].shape == (4, 128)
    np.testing.assert_array_equal(
        first["decoder_target_tokens"], corpus.stream(4).batch(3)["decoder_target_tokens"]
    )
    assert corpus.ledger().summary() == []
    with pytest.raises(m4.SettingError, match=r"CorpusSpec.vocabulary_size = 0"):
        m4.prepare_corpus(tmp_path / "other", Made({"gl": 60}), vocabulary_size=0)


UV = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.skipif(not Path(UV).is_file(), reason="needs uv")
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    """Built from what is committed or added; with what it depends on, in the lock's versions."""
    source, there = tmp_path / "source", tmp_path / "env"
    listed = ("m4", "pyproject.toml", "README.md", "LICENSE")
    for name in filter(None, ran("git", "ls-files", "-z", *listed, cwd=ROOT).split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)

    def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
        return subprocess.run(
            [UV, *arguments], capture_output=True, text=True, check=False, env=environment,
            cwd=tmp_path,
        )  # fmt: skip

    build = ("--no-build-isolation", f"--python={sys.executable}")  # the wheel from the sdist
    made = uv("build", *build, f"--out-dir={tmp_path}", str(source))
    assert made.returncode == 0, made.stderr
    (wheel,), (_,) = tmp_path.glob("m4-*.whl"), tmp_path.glob("m4-*.tar.gz")
    assert uv("venv", f"--python={sys.executable}", str(there)).returncode == 0
    python, lock = str(there / "bin" / "python"), ROOT / "requirements.lock"
    made = uv("pip", "install", f"--python={python}", f"--constraint={lock}", str(wheel))
    if re.search(r"Failed to fetch|error sending request|dns error", made.stderr):
        pytest.skip("no package registry answers")
    assert made.returncode == 0, made.stderr
    (packages,) = there.glob("lib/python*/site-packages")
    assert not (packages / "pytest").exists()

    said = functools.partial(ran, cwd=tmp_path, env=ALONE)
    program = str(there / "bin" / "m4")
    assert said(program, "--version") == f"m4 {m4.__version__}, jax {jax.__version__}: 1 x cpu\n"
    assert f"usage: {Path(program).relative_to(tmp_path)} " in said(program, "--help")
    assert str(packages) in said(python, "-c", "import m4; print(m4.__file__)")
    (tmp_path / "gin_configs").mkdir()
    shutil.copy(TINY, tmp_path / "gin_configs" / "demo.gin")
    said(program, "demo", "--gin_file=gin_configs/demo.gin", "--model_dir=runs/demo")
    (readme,) = [b for b in blocks_of(ROOT / "README.md") if b.language == "python"]
    said(python, "-c", readme.text)
    assert (tmp_path / "delta_bleu.png").stat().st_size > 1000


def test_mistakes_of_a_layer_are_one_line() -> None:
    sizes = {"num_experts": 4, "mlp_width": 8, "activations": ("relu",), "dropout_rate": 0.0}
    with pytest.raises(
        InputError, match=r"^MoeLayer\.gate = 'switch': must be a reference to a Gate"
    ):
        m4.MoeLayer(**sizes, gate="switch")  # type: ignore[arg-type]
    layer, x, ones = m4.MoeLayer(**sizes), np.zeros((2, 3, 4), "f4"), np.ones((2, 3), "f4")
    with pytest.raises(TypeError, match=r"^mask_BL: must be bool, True for real .* is float32"):
        layer.init(jax.random.key(0), x, ones, deterministic=True)
    said = r"^x_BLM \[2, 3, 4\], mask_BL \[2, 4\]: must be \[batch, length, width\]"
    with pytest.raises(ValueError, match=said):
        layer.init(jax.random.key(0), x, np.ones((2, 4), bool), deterministic=True)


def test_mistakes_from_python_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config.gin there"):
        m4.load(tmp_path)
    with pytest.raises(ConfigError, match=r"must be a whole number from 0 to"):
        m4.train(TINY, model_dir=tmp_path / "x", bindings=["TRAIN_STEPS = -1"])
    with pytest.raises(InputError, match=r"^allow_modules = 'mine': must be a list of texts"):
        m4.load(tmp_path, allow_modules="mine")
    with pytest.raises(InputError, match=r"^bindings = 'TRAIN_STEPS = 2': must be a list of texts"):
        m4.train(TINY, bindings="TRAIN_STEPS = 2")
    with pytest.raises(InputError, match=r"^log = 3: must be a function of a row"):
        m4.train(TINY, model_dir="none", log=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^plot_delta: rows must be those of `delta`"):
        m4.plot_delta([{}], tmp_path / "delta.png")
    empty = command("train", f"--gin_file={TINY}", "--model_dir=")
    assert "must be text that is not empty" in empty.mistake
