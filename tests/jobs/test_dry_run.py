"""`--dry_run`: all is checked, shapes alone are made, and nothing is written."""

import re
from pathlib import Path

import pytest

from tests import t5x_files
from tests.command_line import TINY, Said, experiment_of, m4

JOBS = ("train", "baselines", "decode", "eval", "score", "demo", "translate")


def dry(job: str, *more: str) -> Said:
    to = ("--to=gl",) if job == "translate" else ()
    return m4(job, f"--gin_file={TINY}", "--model_dir=run", "--dry_run", *to, *more)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("job", JOBS)
def test_every_job_checks_its_config_and_writes_nothing(job: str, tmp_path: Path) -> None:
    said = dry(job).ok()
    last = f"{job}: the config is right; nothing was computed or written"
    assert said.out.splitlines()[-1] == last
    wrong = dry(job, "--gin.transformer.Transformer.wdith=16").mistake
    assert "has no parameter wdith; did you mean width?" in wrong
    assert not list(tmp_path.iterdir())


def test_parameters_and_memory_are_those_of_the_shapes() -> None:
    """tiny.gin: of 400 pieces rounded up to 512, M 16, F 32, N·D 16, 4 experts, 1 + 1 layers.

    Embedding 512·16 = 8,192. Experts 2·4·2·16·32 = 8,192. Attention 3·4·16·16 = 3,072. Routers
    2·16·4 = 128, position biases 2·2·32 = 128, norms (2 + 3 + 2)·16 = 112: 368. Adam has two
    moments of each.
    """
    made = experiment_of(TINY, "MODEL_DIR = 'run'")
    assert made.vocabulary_multiple == 128
    found = dict(re.findall(r"^ *(\w[^\d\n]*?)  +([\d,.]+)", dry("train").out, re.MULTILINE))
    assert found["parameters: embeddings and logits"] == "8,192"
    assert found["parameters: experts"] == "8,192"
    assert found["parameters: attention"] == "3,072"
    assert found["parameters: routers, norms, biases"] == "368"
    total = 8192 + 8192 + 3072 + 368
    assert found["parameters"] == f"{total:,}"
    assert found["memory of a device: gradients"] == f"{4 * total / 2**20:,.2f}"
    assert found["memory of a device: optimizer state"] == f"{2 * 4 * total / 2**20:,.2f}"
    # Keys and values of two beams of 24 sentences, in float32: of 16 targets and 32 sources.
    cache = 2 * 24 * 2 * (16 + 32) * 16 * 4
    assert f"{cache / 2**20:,.2f} MiB" in dry("decode").out


def test_what_the_job_would_refuse_is_refused(tmp_path: Path) -> None:
    assert "make_mesh" in dry("train", "--gin.mesh.make_mesh.data=3").mistake
    parameters = t5x_files.targets(t5x_files.t5_parameters(rows=90, layers=1))
    place = t5x_files.write(tmp_path / "t5", 5, parameters)
    assert "InitialModel.vocabulary" in dry("train", f"--init_from={place}").mistake
    several = ("--process_count=2", "--process_index=0", "--coordinator_address=localhost:1")
    assert "one process checks a config" in dry("train", *several).mistake
    assert [path.name for path in tmp_path.iterdir()] == ["t5"]
