"""`m4 new`: from a folder of sentence pairs to a gin file that all jobs take."""

import io
import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4 import config
from m4.cli.arguments import parse, split_arguments
from m4.jobs import new_config
from tests.command_line import Said, contents, m4
from tests.data import folders
from tests.data.corpora import write


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(new_config, "available_cpus", lambda: {0, 1})
    return tmp_path


def new(*words: str) -> Said:
    return m4("new", *words)


def commands_of(said: Said) -> list[list[str]]:
    lines = said.out.splitlines()
    return [shlex.split(line) for line in lines if line.startswith("m4 ")]


def test_a_folder_becomes_a_gin_file_and_stays_as_it_is(here: Path) -> None:
    folder = folders.tsv(here / "corpus")
    with (folder / "gl.train.tsv").open("a", encoding="utf-8") as file:
        file.write("no tab\n")  # line 83
    before = contents(folder)
    said = new("corpus", "--out=mine.gin", "--yes")
    assert (said.status, said.err) == (0, ""), said.err
    assert "assumed: minutes of training: 60" in said.out
    assert contents(folder) == before
    assert "gl.train.tsv: 1 skipped: no tab (line 83)" in " ".join(said.out.split())
    experiment = config.load(["mine.gin"]).experiment()
    assert experiment.data.corpus.languages == ["fy", "gl", "pt"]
    assert experiment.baselines is not None
    assert experiment.model_dir == "runs/mine"
    words = commands_of(said)
    assert [each[1] for each in words] == ["data", "demo", "demo"]
    for each in words:
        config.load(["mine.gin"], parse(each[1:]).gin_bindings).experiment()
    assert "TRAIN_STEPS = 40" in split_arguments(words[1])[1]
    again = new("corpus", "--out=mine.gin", "--yes")
    assert "mine.gin: is there, and is never written over" in again.mistake


def test_aligned_folders_and_tmx(here: Path) -> None:
    for code in ("fy", "gl", "pt"):
        text = [f"{pair.second}\n" for pair in folders.pairs(code)]
        for split, part in (("train", text[20:]), ("dev", text[:10]), ("test", text[10:20])):
            write(here / "aligned" / split / code, "".join(part))
    folders.tmx(here / "tmx")
    for name, wanted in (("aligned", ["fy-gl", "fy-pt", "gl-pt"]), ("tmx", ["fy", "gl"])):
        said = new(name, f"--out={name}.gin", "--yes")
        assert (said.status, said.err) == (0, ""), said.err
        spec = config.load([f"{name}.gin"]).experiment().data.corpus
        assert spec.languages == wanted
        assert type(spec.opened_source).__name__.lower() == name


def test_what_people_change_first_is_a_macro(here: Path) -> None:
    folders.tsv(here / "corpus")
    new("corpus", "--yes").ok()
    changed = {"GATE": "@switch.switch", "LEARNING_RATE": 1e-3, "LAYERS": 6, "WIDTH": 64,
               "HEADS": 2, "EXPERTS": 4,
               "TRAIN_STEPS": 9, "BATCH_SIZE": 16, "DROPOUT_RATE": 0.3, "TEMPERATURE": 5.0,
               "VOCABULARY_SIZE": 900, "BASELINE_STEPS": 10, "TEST_SENTENCES": 3}  # fmt: skip
    given = [f"{name} = {value}" for name, value in changed.items()]
    made = config.load(["corpus.gin"], given).experiment()
    model = made.build_model({"vocab_size": 900}, 6)
    assert (model.width, model.encoder_layers, model.decoder_layers) == (64, 6, 6)
    experts = model.encoder_experts
    assert experts is not None
    assert getattr(experts.gate, "__name__", "") == "switch"
    assert made.baselines is not None
    small = made.baselines.low.build_model({"vocab_size": 900}, 2)
    assert (small.width, small.encoder_layers, small.moe) == (64, 2, None)
    assert made.baselines.low.training.total_steps == 10
    assert made.decoding.test_sentences == 3


def lines_of(run: Path) -> set[int]:
    """Returns the numbers of translations in the files."""
    files = [*run.glob("decodes/*.jsonl"), *run.glob("baselines/*/decodes/*.jsonl")]
    assert files
    return {len(path.read_text(encoding="utf-8").splitlines()) for path in files}


def wrong_column(here: Path) -> None:
    folders.tsv(here / "corpus", swapped="gl")


def without_english(here: Path) -> None:
    folders.tsv(here / "corpus")
    for split in ("train", "dev", "test"):
        lines = [f"der Hund und das Haus {n}\tle chien et la maison {n}\n" for n in range(30)]
        write(here / "corpus" / f"de-fr.{split}.tsv", "".join(lines))


def no_partner(here: Path) -> None:
    (folders.moses(here / "corpus") / "test.en-gl.gl").unlink()


def unequal(here: Path) -> None:
    write(folders.moses(here / "corpus") / "test.en-gl.gl", "one line\n")


def empty(here: Path) -> None:
    (here / "corpus").mkdir()


def other_fields(here: Path) -> None:
    write(here / "corpus" / "gl.train.jsonl", '{"id": 1, "text": "a"}\n')


def two_test_sets(here: Path) -> None:
    (folders.tsv(here / "corpus") / "gl.devtest.tsv").write_text("red\troxo\n")


def other_encoding(here: Path) -> None:
    path = folders.tsv(here / "corpus") / "gl.train.tsv"
    path.write_bytes("ni\xf1o\tniño\n".encode("latin-1"))


BAD: dict[Callable[[Path], None], str] = {
    empty: "corpus: expected sentence pairs, .*; saw no files",
    no_partner: r"test.en-gl.en: its gl side is missing",
    unequal: "test.en-gl.en has 10 lines and .*test.en-gl.gl 1",
    wrong_column: "saw it on the other side of gl",
    without_english: "corpus: de_fr: the text of en is not English; other pairs are named by",
    other_fields: "gl.train.jsonl line 1: expected an object",
    two_test_sets: "'gl.devtest.tsv': its name says devtest, and it would not be read; call all",
    other_encoding: r"gl.train.tsv: no pairs in it; 1 line skipped: not UTF-8 .line 1.",
}


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_mistake_is_one_line_that_says_what_was_expected_and_seen(
    make: Callable[[Path], None], here: Path
) -> None:
    make(here)
    said = new("corpus", "--yes")
    assert re.search(BAD[make], said.mistake), said.mistake
    assert not (here / "corpus.gin").exists()


def test_the_gin_file_goes_beside_the_folder_never_into_it(here: Path) -> None:
    folders.tsv(here / "corpus")
    said = new("corpus", "--out=corpus/mine.gin").mistake
    assert said.endswith("nothing is written into corpus; --out=mine.gin"), said
    assert "no folder" in new("corpus", "--out=nowhere/mine.gin").mistake
    assert "FOLDER = 'nowhere': must be a folder that exists" in new("nowhere").mistake
    assert "reads no config" in new("corpus", "--gin.TRAIN_STEPS=3").mistake


def test_english_in_the_second_column_of_every_file_is_found(here: Path) -> None:
    folders.tsv(here / "corpus", swapped="gl fy pt")
    said = new("corpus", "--yes")
    assert "English: column 2" in said.out
    assert "tsv.Tsv.english_column = 2\n" in (here / "corpus.gin").read_text(encoding="utf-8")
    source = config.load(["corpus.gin"]).experiment().data.corpus.opened_source
    assert next(iter(source.pairs("en-gl", "test"))) == folders.pairs("gl")[0]


def test_only_what_is_ambiguous_is_asked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.plain_tsv(here / "corpus")
    answers = itertools.chain(["n"], ["", "5"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    assert "no dev or test sentences in {lang}.tsv" in new("corpus").mistake
    said = new("corpus").ok()
    asked = " ".join(said.out.split())
    assert "hash of their first side (dev 1 in 100, test 1 in 50) [y/n] (y): " in asked
    assert "minutes of training (60): " in asked
    assert "assumed" not in said.out
    text = (here / "corpus.gin").read_text(encoding="utf-8")
    assert "tsv.Tsv.dev_every = 100\ntsv.Tsv.test_every = 50\n" in text


def test_one_language_is_enough(here: Path) -> None:
    folders.tsv(here / "corpus", "gl")
    said = new("corpus", "--yes").ok()
    assert config.load(["corpus.gin"]).experiment().data.corpus.languages == ["gl"]
    for each in commands_of(said):
        config.load(["corpus.gin"], parse(each[1:]).gin_bindings).experiment()


def test_minutes_are_a_flag_and_the_same_call_writes_the_same_file(here: Path) -> None:
    folders.tsv(here / "corpus")
    texts = []
    for minutes in (1, 1, 600):
        said = new("corpus", "--yes", f"--minutes={minutes}", "--out=a.gin")
        assert "assumed" not in said.out
        texts.append((here / "a.gin").read_text(encoding="utf-8"))
        (here / "a.gin").unlink()
    assert texts[0] == texts[1]
    steps = [int(re.findall(r"TRAIN_STEPS = (\d+)", text)[0]) for text in texts[1:]]
    assert steps[0] <= steps[1]
    assert not re.search(r"\b0 minutes", said.out)
    assert "--minutes=0: must be 1 or more" in new("corpus", "--minutes=0").mistake


def test_without_an_answer_nothing_is_guessed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.tsv(here / "corpus")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "--yes takes the defaults" in new("corpus").mistake


NASTY = """it's "a" #b <b> [red] [_b] $(touch x) %gin.REQUIRED \\ = 1"""
BREAK = "a\n# what\nm4 demo\r\u2028MODEL_DIR = 1"


@pytest.mark.parametrize("make", [folders.tsv, folders.json_mixed, folders.po])
def test_no_name_becomes_a_line_of_the_gin_file(make: Callable[[Path], Path], here: Path) -> None:
    folder = make(here / NASTY)
    for name in (NASTY, BREAK):
        write(folder / f"{name}.txt", "")
        write(folder / f"gl.{name}.what.tsv", "")
    said = new(NASTY, "--yes").ok()
    made = config.load([f"{NASTY}.gin"]).experiment()
    source: Any = made.data.corpus.opened_source
    assert (made.model_dir, source.folder) == (f"runs/{NASTY}", NASTY)
    plain = new(make(here / "plain").name, "--yes")
    assert plain.status == 0
    lines = (here / "plain.gin").read_text(encoding="utf-8").count("\n")
    assert (here / f"{NASTY}.gin").read_text(encoding="utf-8").count("\n") == lines
    # Nor of the commands to paste.
    assert [each[1:] for each in commands_of(said)] == [
        [word.replace("plain", NASTY) for word in each[1:]] for each in commands_of(plain)
    ]
    assert repr(f"{BREAK}.txt")[:20] in " ".join(said.err.split())


def test_a_name_with_a_line_break_is_refused(here: Path) -> None:
    """No other job takes a run's folder of that name."""
    folders.tsv(here / BREAK)
    folders.tsv(here / "plain")
    assert f"{BREAK!r}: a name has no line breaks" in new(BREAK, "--out=a.gin", "--yes").mistake
    said = new("plain", f"--out={BREAK}.gin", "--yes")
    assert f"{BREAK + '.gin'!r}: a name has no line breaks" in said.mistake


def test_the_model_depends_on_the_corpus_and_the_cores_alone() -> None:
    lengths = {code: np.full((2, 50), 20) for code in ("gl", "fy")}
    small = {"gl": 5000, "fy": 3000}
    choose = new_config._choose
    few, *_ = choose(small, lengths, 3000, 60, 2)
    assert few == choose(small, lengths, 3000, 60, 2)[0]
    assert (few["width"], few["steps"]) == (256, 1100)  # five epochs of both directions
    many, minutes, _ = choose({"gl": 10**6, "fy": 10**6}, lengths, 16_000, 60, 2)
    assert (many["width"], minutes <= 60) == (128, True)
    more, *_ = choose({"gl": 10**6, "fy": 10**6}, lengths, 16_000, 60, 64)
    assert more["steps"] > 10 * many["steps"]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_trial_runs_and_resumes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    folders.moses(here / "corpus")
    said = new("corpus", "--yes")
    tiny = ["--gin.WIDTH=32", "--gin.HEADS=1", "--gin.MLP_WIDTH=32", "--gin.TRAIN_STEPS=3",
            "--gin.BASELINE_STEPS=2", "--gin.VOCABULARY_SIZE=500", "--gin.EXPERTS=2"]  # fmt: skip
    _, trial, _ = commands_of(said)
    m4(*trial[1:], *tiny, "--gin.TEST_SENTENCES=4").ok()
    (run,) = here.glob("runs/*_trial")
    assert lines_of(run) == {4}
    trained = {path: path.read_text() for path in run.rglob("metrics.jsonl")}
    # Other test sentences: what is trained is not trained again.
    m4(*trial[1:], *tiny, "--gin.TEST_SENTENCES=6").ok()
    assert lines_of(run) == {4, 6}  # the run's own stay, and a trial has a folder of its own
    assert {path: path.read_text() for path in run.rglob("metrics.jsonl")} == trained
