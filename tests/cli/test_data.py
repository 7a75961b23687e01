"""`m4 data ...`: looks at the corpus, trains nothing, and touches no accelerator."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.directions import pair_of
from tests.command_line import TINY, contents, experiment_of, m4


@pytest.mark.slow
def test_no_accelerator_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from jax._src import xla_bridge\n"
        "from m4.__main__ import main\n"
        "assert main(['data', 'prepare', *sys.argv[3:5]]) == 0\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert not {'tensorflow', 'seqio'} & set(sys.modules)\n"
    )
    folder = tmp_path / "model"
    command = [sys.executable, "-c", code, "data", "preview", f"--gin_file={TINY}",
               f"--model_dir={folder}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "es Spanish" in done.stdout
    made = json.loads((folder / "data_preview.json").read_text("utf-8"))
    assert made["sampler"] == "temperature"
    # Four steps of 8 rows are far less than one epoch.
    assert made["repeated_more"] == {}


@pytest.fixture(scope="module")
def previewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("previewed") / "model"
    m4("data", "preview", f"--gin_file={TINY}", f"--model_dir={folder}").ok()
    return folder


@pytest.mark.slow
def test_other_samplers_and_steps_in_the_same_folder(previewed: Path, tmp_path: Path) -> None:
    """Nothing is trained yet, so the folder's config may change; the corpus is not rebuilt."""
    cache = {name: at for name, at in contents(previewed).items() if name.startswith("data/")}
    text = TINY.read_text(encoding="utf-8")
    config = tmp_path / "other.gin"
    config.write_text(
        text.replace(
            "from m4.data import corpus\n",
            "from m4.data import corpus\nfrom m4.data.samplers import schedule\n"
            "from m4.data.samplers import uniform\nfrom m4.data.samplers import unimax\n"
            "from m4.data.samplers import learned\n",
        ),
        encoding="utf-8",
    )
    given = (f"--gin_file={config}", f"--model_dir={previewed}",
             "--gin.TRAIN_STEPS=200", "--gin.experiment.Data.sample_by='tokens'")  # fmt: skip

    def preview(*arguments: str) -> dict:
        said = m4("data", "preview", *given, *arguments).ok()
        assert "corpus:" not in said.out
        return json.loads((previewed / "data_preview.json").read_text("utf-8"))

    def drawn(made: dict, code: str) -> dict:
        return made["pairs"][code]

    uniform = preview("--gin.experiment.Data.sampler=@uniform.uniform", "--most_epochs=5")
    assert drawn(uniform, "es")["token_share"] == pytest.approx(1 / 3, rel=0.05)
    assert drawn(uniform, "gl")["epochs"] > 5
    assert next(iter(uniform["repeated_more"])) == "gl"
    learned = preview("--gin.experiment.Data.sampler=@learned.Learned()")
    assert learned["sampler"] == "Learned"
    most = 1.2 * max(drawn(uniform, code)["epochs"] for code in ("es", "pt"))
    unimax = preview(
        "--gin.experiment.Data.sampler=@unimax.unimax", f"--gin.unimax.unimax.max_epochs={most}"
    )
    # About 60 pairs `most` times; whole blocks of draws are exact, the rest is random.
    assert drawn(unimax, "gl")["epochs"] == pytest.approx(most, rel=0.15)
    phased = preview(
        "--gin.experiment.Data.sampler=@schedule.Schedule()",
        "--gin.schedule.Schedule.phases=((0, @uniform.uniform, ['es']),)",
    )
    assert drawn(phased, "es")["pair_share"] == 1.0
    assert drawn(phased, "gl")["pairs"] == 0
    assert {name: at for name, at in contents(previewed).items() if name.startswith("data/")} == (
        cache
    )


def test_the_pairs_of_a_step_are_those_of_its_batch(previewed: Path) -> None:
    folder = (f"--gin_file={TINY}", f"--model_dir={previewed}")
    said = m4("data", "batch", *folder, "--step=3").ok()
    header, *lines = (line.split("\t") for line in said.out.splitlines())
    pairs = [dict(zip(header, line, strict=True)) for line in lines]
    experiment = experiment_of(TINY, f"MODEL_DIR = {str(previewed)!r}")
    cache = Cache(previewed / "data")
    made = build(experiment, cache).stream.batch(2)
    for side, name in (("source", "encoder_input_tokens"), ("target", "decoder_target_tokens")):
        found = [sum(int(one[f"{side}_pieces"]) for one in pairs if int(one["row"]) == row)
                 for row in range(experiment.training.batch_size)]  # fmt: skip
        assert found == (made[name] > 0).sum(axis=1).tolist()
    for one in pairs:
        code = pair_of(one["direction"])
        pair = [*cache.pairs(code, "train")][int(one["line"]) - 1]
        assert (pair.first, pair.second) == (one["first"], one["second"])
    mistake = m4("data", "batch", *folder, "--step=0").mistake
    assert "--step=0: must be from 1 to 4 (TRAIN_STEPS)" in mistake


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--most_epochs=0"], "--most_epochs=0.0: must be above 0"),
        (["--gin.experiment.Data.sample_by='words'"], "Data.sample_by = 'words': must be"),
    ],
)  # fmt: skip
def test_mistakes(previewed: Path, arguments: list[str], said: str) -> None:
    mistake = m4("data", "preview", f"--model_dir={previewed}", *arguments).mistake
    assert mistake.startswith("m4 data preview: ")
    assert said in mistake
