"""Bad input gets one line, exit status 2, before anything compiles and without a loss."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from m4.data.cache.cache import Cache
from m4.storage.checkpoints import Checkpoints
from m4.storage.locks import local_lock
from tests.command_line import TINY, Said, contents, m4

COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: COMPILES.append(event) if "backend_compile" in event else None
)

SENTENCES = [f"the {a} sees the {b}" for a in ("bird", "fish", "tree") for b in range(20)]


@pytest.fixture(autouse=True)
def _nothing_compiles() -> Iterator[None]:
    COMPILES.clear()
    yield
    assert not COMPILES


def tsv_folder(folder: Path, bad_line: bytes = b"") -> Path:
    """Two languages of 60 pairs; `bad_line` stands in line 7 of one of them."""
    folder.mkdir()
    for language in ("gl", "pt"):
        lines = [f"{text}\t{text[::-1]}{language}".encode() for text in SENTENCES]
        if bad_line and language == "pt":
            lines.insert(6, bad_line)
        (folder / f"{language}.train.tsv").write_bytes(b"\n".join(lines) + b"\n")
        (folder / f"{language}.test.tsv").write_text("a road\todar a\n", encoding="utf-8")
    return folder


def from_tsv(folder: Path) -> list[str]:
    return [
        "--gin.corpus.CorpusSpec.source=@tsv.Tsv()",
        f"--gin.tsv.Tsv.folder={str(folder)!r}",
        "--gin.corpus.CorpusSpec.vocabulary_size=320",
        "--gin.moe.MoeLayer.num_experts=8",
        "--gin.TRAIN_STEPS=1",
    ]


def train(folder: Path, *arguments: object) -> Said:
    return m4("train", f"--gin_file={TINY}", f"--model_dir={folder}", *arguments)


def config(tmp_path: Path, old: str, new: str) -> Path:
    """tiny.gin with one thing changed."""
    text = TINY.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path = tmp_path / "changed.gin"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def line_of(path: Path, text: str) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, start=1) if text in line)


@pytest.fixture(scope="module")
def trained_from(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(text, model): one step on text with a bad line. Read-only: `trained` is a copy."""
    folder = tmp_path_factory.mktemp("trained")
    text = tsv_folder(folder / "text", b"no tab here")
    said = train(folder / "model", *from_tsv(text), "--gin.tsv.Tsv.on_bad_line='skip'").ok()
    # Counted and reported.
    assert "1 of 121 training pairs left out: source: no tab: 1\n" in said.out
    assert "120 training pairs in 2 pairs of languages" in said.out
    # A checkpoint knows what it was trained on.
    checkpoints = Checkpoints(folder / "model" / "checkpoints", read_only=True)
    note = checkpoints.note(1)
    checkpoints.close()
    assert note["corpus"] == Cache(folder / "model" / "data").fingerprint
    COMPILES.clear()
    return text, folder / "model"


@pytest.fixture
def trained(trained_from: tuple[Path, Path], tmp_path: Path) -> tuple[Path, list[str]]:
    """A model's folder and the arguments that it was trained with."""
    text, model = trained_from
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "model", [*from_tsv(text), "--gin.tsv.Tsv.on_bad_line='skip'"]


# ------------------------------------------------------------------------------------------- gin


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("%BATCH_SIZE", "%BATCHSIZE", "is not set; did you mean BATCH_SIZE?"),
        ("TRAIN_STEPS = 4", "TRAIN_STEPS = %gin.REQUIRED", "TRAIN_STEPS has no value"),
    ],
)
def test_a_mistake_in_a_gin_file_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    """Others are in tests/test_config.py."""
    path = config(tmp_path, old, new)
    mistake = m4("train", f"--gin_file={path}", f"--model_dir={tmp_path / 'model'}").mistake
    assert mistake.startswith(f"m4 train: config: {path} line {line_of(path, new)}: "), mistake
    assert said in mistake
    assert not (tmp_path / "model").exists()


def test_missing_files(tmp_path: Path) -> None:
    mistake = m4("train", "--gin_file=missing.gin", "--gin_search_paths=gin_configs,.").mistake
    assert mistake == (
        "m4 train: --gin_file=missing.gin: no such file in gin_configs, . (--gin_search_paths)"
    )
    mistake = m4("decode", f"--model_dir={tmp_path}").mistake
    assert mistake == f"m4 decode: --model_dir={tmp_path}: no config.gin there; train first"
    assert "--gin_file=" in m4("train").mistake
    mistake = m4("train", "mine.gin").mistake
    assert mistake.endswith("no config.gin there; a config is given as --gin_file=mine.gin")


def test_a_file_in_the_search_paths_is_found(tmp_path: Path) -> None:
    mistake = m4("train", "--gin_file=tiny.gin", f"--gin_search_paths={TINY.parent}").mistake
    line = line_of(TINY, "MODEL_DIR =")
    assert mistake == (
        f"m4 train: config: {TINY} line {line}: MODEL_DIR has no value: --gin.MODEL_DIR=..."
    )


def test_a_missing_binding_is_named(tmp_path: Path) -> None:
    for removed, name in (
        ("corpus.CorpusSpec.source = @cldr.Cldr\n", "corpus.CorpusSpec.source"),
        ("experiment.Training.optimizer = @optimizer.adamw", "experiment.Training.optimizer"),
    ):
        path = config(tmp_path, removed, "")
        said = m4("train", f"--gin_file={path}", f"--model_dir={tmp_path / name}")
        assert said.mistake == f"m4 train: config: {name} must be set"


# ------------------------------------------------------------------------------------------ text


def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path) -> None:
    text = tsv_folder(tmp_path / "text", b"caf\xe9\tcaf\xe9")
    assert train(tmp_path / "model", *from_tsv(text)).mistake == (
        f"m4 train: {text}/pt.train.tsv line 7: not UTF-8 "
        "(Tsv.on_bad_line = 'skip' counts such lines instead)"
    )
    assert contents(tmp_path / "model") == {}


def test_a_language_without_data(tmp_path: Path) -> None:
    text = tsv_folder(tmp_path / "text")
    asked = "--gin.corpus.CorpusSpec.languages=['gl', 'eo']"
    mistake = train(tmp_path / "model", *from_tsv(text), asked).mistake
    assert "no en-eo in files called like" in mistake
    assert "en-gl, en-pt" in mistake
    (text / "eo.train.tsv").touch()
    mistake = train(tmp_path / "model", *from_tsv(text), asked).mistake
    assert "eo.train.tsv: no pairs in it" in mistake
    mistake = train(tmp_path / "cldr", "--gin.cldr.Cldr.sizes={'glg': 9}").mistake
    assert "Cldr.sizes = 'glg'" in mistake
    assert "nearest: gl" in mistake


def test_a_folder_without_text(tmp_path: Path) -> None:
    mistake = train(tmp_path / "model", *from_tsv(tmp_path / "missing")).mistake
    assert "tsv.Tsv.folder = " in mistake
    assert mistake.endswith("missing': must be a folder that exists")
    tatoeba = Path(__file__).parents[2] / "gin_configs" / "tatoeba.gin"
    model = f"--model_dir={tmp_path}/model"
    mistake = m4("train", f"--gin_file={tatoeba}", model, f"--gin.TEXT_DIR={tmp_path}/no").mistake
    assert mistake.endswith("/no' (TEXT_DIR): must be a folder that exists")


def test_an_address_of_the_corpus_that_is_none_names_its_setting(tmp_path: Path) -> None:
    for place, why in (("s3://b/c", "s3:// is not supported"), ("gs:/b/c", "begins with gs://")):
        mistake = train(tmp_path, f"--gin.experiment.Data.data_dir='{place}'").mistake
        assert f"experiment.Data.data_dir = '{place}': must be a folder or an address" in mistake
        assert why in mistake


def test_a_corrected_mistake_needs_no_fresh_folder(tmp_path: Path) -> None:
    small = "--gin.corpus.CorpusSpec.vocabulary_size=100"
    assert "CorpusSpec.vocabulary_size" in train(tmp_path / "model", small).mistake
    # Another mistake is reported, and not that the folder belongs to the first attempt.
    assert "'xx'" in train(tmp_path / "model", "--gin.cldr.Cldr.sizes={'xx': 9}").mistake


# ---------------------------------------------------------------------------- devices and folders


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--gin.mesh.make_mesh.expert=3"],
            "make_mesh.expert = 3: must be a size that makes stage 1 x data -1 x fsdp 1 x node 1",
        ),
        (["--gin.mesh.make_mesh.data=0"], "mesh.make_mesh.data = 0: must be at least 1, or -1"),
        (["--gin.BATCH_SIZE=12"], "(BATCH_SIZE): must be divisible by 8"),
        (
            ["--gin.mesh.make_mesh.expert=8", "--gin.moe.MoeLayer.num_experts=12"],
            "MoeLayer.num_experts = 12: must be divisible by 8, the mesh axes "
            "expert; nearest valid sizes: 8 and 16",
        ),
    ],
)
def test_a_mesh_that_does_not_divide(tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in train(tmp_path / "model", *arguments).mistake


def test_another_config_or_vocabulary_or_job_and_nothing_is_lost(
    trained: tuple[Path, list[str]],
) -> None:
    folder, arguments = trained
    before = contents(folder)
    assert any(name.startswith("checkpoints/1/params") for name in before)

    mistake = train(folder, *arguments, "--gin.schedules.rsqrt.peak=0.5").mistake
    assert f"MODEL_DIR = {folder} belongs to another config" in mistake
    assert "schedules.rsqrt.peak is 0.001 there and 0.5 here" in mistake
    assert f"--init_from={folder} --keep_optimizer continues from it" in mistake
    mistake = train(folder, *arguments, "--gin.transformer.Transformer.width=48").mistake
    assert f"MODEL_DIR = {folder} belongs to another config: transformer.Transformer.w" in mistake
    assert "--fresh" in mistake
    said = m4(
        "translate", f"--model_dir={folder}", "--gin.schedules.rsqrt.peak=0.5", "--to=en", "a"
    )
    assert "belongs to another config" in said.mistake

    with local_lock(folder / ".lock.train", ""):
        m4("data", "preview", f"--model_dir={folder}").ok()
        before = contents(folder)
        said = train(folder, *arguments)
    # Not 2: a JobSet starts it again, and the other job may be about to end.
    assert said.status == 1
    assert said.err == f"m4 train: MODEL_DIR = {folder}: another m4 job is at work there\n"

    said = m4("translate", f"--model_dir={folder}", "--to=fr", "a")
    assert "does not translate into it" in said.mistake
    assert contents(folder) == before

    next(folder.glob("data/*/vocabulary.model")).write_bytes(b"another")
    before = contents(folder)
    for job in ("train", "decode"):
        more = "--gin.TRAIN_STEPS=2"  # a finished model would not be opened
        mistake = m4(job, f"--model_dir={folder}", more).mistake
        assert ": damaged: vocabulary.model: " in mistake
        assert f"{folder}/data/" in mistake
    assert contents(folder) == before


def test_changed_text_is_noticed(
    trained: tuple[Path, list[str]], trained_from: tuple[Path, Path]
) -> None:
    folder, arguments = trained
    path = trained_from[0] / "gl.train.tsv"
    content = path.read_bytes()
    before = contents(folder)
    try:
        path.write_bytes(content + b"one more\toutro\n")
        mistake = train(folder, *arguments).mistake
        assert "trained with another corpus (source.by_pair.en-gl" in mistake
        assert "--fresh" in mistake
        after = contents(folder)
        assert {name: after[name] for name in before} == before
    finally:
        path.write_bytes(content)


def test_demo_without_baselines_is_refused_at_once(tmp_path: Path) -> None:
    none = "--gin.experiment.Experiment.baselines=None"
    said = m4("demo", f"--gin_file={TINY}", f"--model_dir={tmp_path / 'model'}", none)
    assert "experiment.Experiment.baselines" in said.mistake
    assert contents(tmp_path / "model") == {}
