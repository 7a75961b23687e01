"""Bad input gets one line, exit status 2, before anything compiles and without a loss."""

import errno
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import pytest
from etils import epath

from m4.cli.main import COMMANDS, DATA_COMMANDS, parse
from m4.config import load
from m4.data.cache.cache import Cache
from m4.data.sources.reading.files import chunks
from m4.jobs import train as training
from m4.settings import InputError
from m4.storage.checkpoints import Checkpoints
from m4.storage.files import check_input
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
    """Writes two languages of 60 pairs, with `bad_line` as line 7 of one of them."""
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
        "--gin.corpus.CorpusSpec.source=@tsv.Tsv()", f"--gin.tsv.Tsv.folder={str(folder)!r}",
        "--gin.corpus.CorpusSpec.vocabulary_size=320", "--gin.moe.MoeLayer.num_experts=8",
        "--gin.TRAIN_STEPS=1",
    ]  # fmt: skip


def train(folder: Path, *arguments: object) -> Said:
    return m4("train", f"--gin_file={TINY}", f"--model_dir={folder}", *arguments)


def config(tmp_path: Path, old: str, new: str) -> Path:
    """Writes tiny.gin with one change."""
    text = TINY.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path = tmp_path / "changed.gin"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained_from(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns text with a bad line and a model trained on it for a step; `trained` is a copy."""
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
    """Returns a model's folder and the arguments with which it was trained."""
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
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, start=1) if new in line)
    assert mistake.startswith(f"m4 train: config: {path} line {number}: "), mistake
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


def test_a_folder_without_text(tmp_path: Path) -> None:
    mistake = train(tmp_path / "model", *from_tsv(tmp_path / "missing")).mistake
    assert "tsv.Tsv.folder = " in mistake
    assert mistake.endswith("missing': must be a folder that exists")
    tatoeba = Path(__file__).parents[2] / "gin_configs" / "tatoeba.gin"
    model = f"--model_dir={tmp_path}/model"
    mistake = m4("train", f"--gin_file={tatoeba}", model, f"--gin.TEXT_DIR={tmp_path}/no").mistake
    assert mistake.endswith("/no' (TEXT_DIR): must be a folder that exists")


def test_a_corrected_mistake_needs_no_fresh_folder(tmp_path: Path) -> None:
    small = "--gin.corpus.CorpusSpec.vocabulary_size=100"
    assert "CorpusSpec.vocabulary_size" in train(tmp_path / "model", small).mistake
    # Another mistake is reported, and not that the folder belongs to the first attempt.
    assert "'xx'" in train(tmp_path / "model", "--gin.cldr.Cldr.sizes={'xx': 9}").mistake


# ---------------------------------------------------------------------------- devices and folders


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("mesh.make_mesh.expert=3", "must be a size that makes stage 1 x data -1 x fsdp 1 x node"),
        ("mesh.make_mesh.data=0", "mesh.make_mesh.data = 0: must be at least 1, or -1"),
        ("BATCH_SIZE=12", "(BATCH_SIZE): must be divisible by 8"),
        ("mesh.make_mesh.expert=8 moe.MoeLayer.num_experts=12",
         "= 12: must be divisible by 8, the mesh axes expert; nearest valid sizes: 8 and 16"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide(tmp_path: Path, settings: str, said: str) -> None:
    given = [f"--gin.{setting}" for setting in settings.split()]
    assert said in train(tmp_path / "model", *given).mistake


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


# -------- a refusal of the machine is one line and exit status 1


FULL_DISK = OSError(errno.ENOSPC, "No space left on device", "/runs/a/.lock.train")
BECAUSE_OF_IT = ValueError("cannot write")
BECAUSE_OF_IT.__cause__ = FULL_DISK
QUOTED = ValueError("RESOURCE_EXHAUSTED: [OS error 28: ENOSPC No space left on device]")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FULL_DISK, "m4 train: /runs/a/.lock.train: No space left on device; files written"),
        (BECAUSE_OF_IT, "m4 train: /runs/a/.lock.train: No space left on device;"),
        (QUOTED, "m4 train: No space left on device (ValueError);"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    monkeypatch.setattr(training, "run", mock.Mock(side_effect=error))
    found = m4("train")
    assert found.status == 1
    (line,) = found.err.splitlines()
    assert line.startswith(said)
    with pytest.raises((OSError, ValueError)):  # a mistake of m4's can be found
        m4("train", "--debug")


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "x")
    monkeypatch.setattr(training, "run", mock.Mock(side_effect=error))
    with pytest.raises(FileNotFoundError):
        m4("train")


def test_an_argument_that_is_not_utf8_is_named() -> None:
    said = m4("translate", "--to=gl", os.fsdecode(b"a\xffb"))
    assert said.mistake == r"m4: argument 3, 'a\\xffb': not UTF-8"


def shell(command: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs a command of sh, for which $0 is this Python."""
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    given = ["sh", "-c", command, sys.executable, *map(str, words)]
    return subprocess.run(given, capture_output=True, text=True, check=False, env=environment)


# The shell closes a stream, or gives one that takes nothing.
PROGRAM = """
import sys
from m4.cli import main
from m4.jobs import streams
streams.open_closed()
file = open(sys.argv[1], "w")
print("a warning", file=sys.stderr)
print("a result")
print(sorted(streams.closed), file.fileno() > 2, file=file)
sys.exit(main.flushed(0, "m4 report"))
"""
FULL = "m4 report: standard output: No space left on device"


@pytest.mark.parametrize(
    ("how", "closed", "out", "err", "status"),
    [
        ("2>&-", "['stderr'] True", "a result\n", "", 0),
        (">&-", "['stdout'] True", "", "a warning\n", 0),
        ("<&- >&- 2>&-", "['stderr', 'stdin', 'stdout'] True", "", "", 0),
        (">/dev/full", "[] True", "", f"a warning\n{FULL}\n", 1),
    ],
)
def test_closed_and_full_streams(
    tmp_path: Path, how: str, closed: str, out: str, err: str, status: int
) -> None:
    done = shell(f'exec "$0" -c "$1" "$2" {how}', PROGRAM, tmp_path / "file")
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)
    assert (tmp_path / "file").read_text() == closed + "\n"


def test_a_job_knows_that_its_output_is_closed() -> None:
    done = shell('exec "$0" -m m4 watch none --once >&-')
    said = "m4 watch: standard output is closed: what the command prints would be lost\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("place", ["FILE/x", "/proc/x", "PIPE"])
def test_an_output_that_cannot_be_written_is_one_line_before_any_work(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    place = place.replace("FILE", f"{tmp_path}/file").replace("PIPE", f"{tmp_path}/pipe")
    for words in (
        ("decode", "--input=x", "--to=gl"), ("export", "--format=t5x"), ("atlas",),
        ("checkpoint", "convert"), ("average", "--last=2"),
    ):  # fmt: skip
        said = m4(*words, "--model_dir=none", f"--output={place}").mistake
        assert f"--output={place}: " in said, words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/proc/self/mem"])
def test_an_input_that_is_no_file_is_one_line(name: str, tmp_path: Path) -> None:
    """Reading it would never end, or fail in the middle."""
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / name
    with pytest.raises(InputError, match=f"^{path}: not a file but a pipe"):
        check_input(path)
    with pytest.raises(InputError, match="not a file but a pipe"):
        next(chunks(epath.Path(path)))


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("-n 32", "Too many open files: 32 are allowed (ulimit -n), m4 needs 256"),
        ("-v 1000000", "Cannot allocate memory: 1,000,000 KiB are allowed (ulimit -v), m4 needs "),
        ("-d 1000000", "Cannot allocate memory: 1,000,000 KiB are allowed (ulimit -d), m4 needs "),
    ],
)
def test_a_machine_that_allows_too_little_is_one_line(limit: str, said: str) -> None:
    """With little memory a compiler would not say so: it hangs."""
    done = shell(f'ulimit {limit}; exec "$0" -m m4 watch none')
    assert done.returncode == 1
    assert f"m4 watch: {said}" in done.stderr
    assert done.stderr.count("\n") == 1


# The arguments.

DEMO = "gin_configs/demo.gin"


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
    for arguments in (["trian"], ["translate", "hello"], ["data"], [], ["train", "--gin_fil=a"]):
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
    for spelled in ("cleaning-report", "cleaning_report"):
        assert parse(["data", spelled]).command == "data cleaning_report"


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
    ["runs/a --to=gl x z", "--to gl runs/a x z", "runs/a x --to=gl z", "runs/a x z --to=gl"],
)
def test_a_run_and_texts_stand_before_or_behind_flags(words: str) -> None:
    assert parse(["translate", *words.split()]).text == ["runs/a", "x", "z"]
    with pytest.raises(SystemExit):
        parse(["translate", *words.split(), "--no_such_flag"])


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ("experiment.Data.about=my text", """--gin.experiment.Data.about="'my text'\""""),
        ("experiment.Data.about=worth $5", "'--gin.experiment.Data.about='\"'\"'worth $5'\"'\"''"),
        (
            "corpus.CorpusSpec.languages=[gl, es]",
            """--gin.corpus.CorpusSpec.languages="['gl', 'es']\"""",
        ),
        ("moe.MoeLayer.gate=top2_gshard", "--gin.moe.MoeLayer.gate=@top2_gshard.top2_gshard"),
        ("transformer.Transformer.moe=none", "--gin.transformer.Transformer.moe=None"),
    ],
)
def test_an_unreadable_value_is_shown_as_it_is_typed(given: str, typed: str) -> None:
    said = m4("train", f"--gin_file={DEMO}", "--dry_run", f"--gin.{given}").mistake
    assert said.endswith(f"text needs quotes, parts an @, None a capital; in a shell: {typed}")
    (word,) = shlex.split(typed)
    name, _, value = word.removeprefix("--gin.").partition("=")
    load([DEMO], [f"{name} = {value}"]).experiment()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("moe.MoeLayer.gate=@top2_gshard", "; did you mean @top2_gshard.top2_gshard?"),
        ("transformer.Transformer.layers=6", "encoder_layers or decoder_layers or scan_layers?"),
    ],
)
def test_what_was_meant_is_said(given: str, said: str) -> None:
    found = m4("train", f"--gin_file={DEMO}", "--dry_run", f"--gin.{given}")
    assert found.mistake.endswith(said)
