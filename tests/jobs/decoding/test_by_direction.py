"""A run whose gate routes by target language, from training to every command that decodes."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from m4.build import build
from m4.data.cache.cache import Cache
from m4.model.transformer import abstract_variables
from m4.plan.program import decode_program
from m4.settings import SettingError
from m4.storage.files import read_jsonl
from tests.command_line import experiment_of, m4
from tests.shared import by_target, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_target(tmp_path_factory)


def ran(command: str, run: Path, *arguments: str) -> str:
    return m4(command, f"--model_dir={run}", *arguments).ok().out


def test_a_task_is_a_target_language(run: Path) -> None:
    experiment = experiment_of(run.parent / "by_target.gin", f"MODEL_DIR = '{run}'")
    model = build(experiment, None, languages=["es", "pt", "gl"]).model
    # en-es, en-pt, en-gl, es-en, pt-en, gl-en.
    assert model.tasks == (0, 1, 2, 3, 3, 3)
    tasks = abstract_variables(model)["params"]["decoder_0"]["moe"]["tasks"]["kernel"]
    assert tasks.shape == (4, 16)


@pytest.mark.slow
@pytest.mark.thorough
def test_every_command_that_decodes_knows_the_direction(run: Path, tmp_path: Path) -> None:
    ran("decode", run)
    rows = read_jsonl(run / "decodes" / "test.gl-en.jsonl")
    sources, expected = ([row[name] for row in rows] for name in ("source", "hypothesis"))
    assert ran("translate", run, "--to=en", "--from=gl", *sources).splitlines() == expected
    into = read_jsonl(run / "decodes" / "test.en-gl.jsonl")
    found = ran("translate", run, "--to=gl", *[row["source"] for row in into])
    assert found.splitlines() == [row["hypothesis"] for row in into]
    texts = tmp_path / "texts"
    texts.write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
    out = tmp_path / "out"
    ran("decode", run, f"--input={texts}", "--from=gl", "--to=en", f"--output={out}")
    assert out.read_text(encoding="utf-8").splitlines() == expected
    ran("score", run)
    scored = [row["logprob"] for row in read_jsonl(run / "decodes" / "logprob-test.gl-en.jsonl")]
    references = tmp_path / "references"
    text = "".join(f"{row['reference']}\n" for row in rows)
    references.write_text(text, encoding="utf-8")
    files = f"--source={texts}", f"--target={references}", "--to=en", "--from=gl"
    said = [json.loads(line)["logprob"] for line in ran("score", run, *files).splitlines()]
    assert said == pytest.approx(scored, rel=1e-5)


def test_a_plan_of_decoding_has_the_directions(run: Path) -> None:
    over = ["mesh.make_mesh.data = 2", "mesh.make_mesh.expert = 4"]
    for bindings, devices in (([], 1), (over, 8)):
        model_dir = f"MODEL_DIR = '{run.parent / 'planned'}'"
        experiment = experiment_of(run.parent / "by_target.gin", model_dir, *bindings)
        program = decode_program(experiment, jax.devices()[:devices], 3)
        assert "direction_B" in str(program.traced.in_tree)


def test_a_direction_that_was_not_trained_is_one_line(run: Path) -> None:
    mistake = m4("translate", run, "ola", "--to=en").mistake
    said = "--from=en, --to=en: the experts of this model depend on the direction, and en-en"
    assert said in mistake
    mistake = m4("translate", run, "ola", "--to=es", "--from=gl").mistake
    assert "gl-es is none of en-es, en-pt, en-gl, es-en, pt-en, gl-en" in mistake


def test_all_directions_must_be_trained(run: Path, tmp_path_factory) -> None:
    experiment = experiment_of(run.parent / "by_target.gin", f"MODEL_DIR = '{run}'")
    data = dataclasses.replace(experiment.data, sampler=lambda sizes: {"en-gl": 0.5, "gl-en": 0.5})
    (corpus,) = (tiny_run(tmp_path_factory) / "data").glob("*/manifest.json")
    parts = build(dataclasses.replace(experiment, data=data), Cache(corpus.parent))
    said = r"^Data\.sampler = .*: must be a sampler with a rate for"
    with pytest.raises(SettingError, match=said):
        _ = parts.program
