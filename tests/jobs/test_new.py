"""`m4 new`: from a folder of sentence pairs to a gin file that all jobs take."""

import io
import itertools
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4 import config
from m4.build import model_of
from m4.cli.main import parse, split_arguments
from m4.data.corpus import CorpusSpec
from m4.data.sources.joined import Joined
from m4.jobs import new_config
from tests.command_line import Said, contents, m4
from tests.data import folders
from tests.data.corpora import write
from tests.documents.blocks import ROOT
from tests.documents.world import write_corpus


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
    assert "read: 0/100 %" in said.out
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


def test_what_people_change_first_is_a_macro(here: Path) -> None:
    folders.tsv(here / "corpus")
    new("corpus", "--yes").ok()
    changed = {"GATE": "@switch.switch", "LEARNING_RATE": 1e-3, "LAYERS": 6, "WIDTH": 64,
               "HEADS": 2, "EXPERTS": 4, "MOE_EVERY": 1,
               "TRAIN_STEPS": 9, "BATCH_SIZE": 16, "DROPOUT_RATE": 0.3, "TEMPERATURE": 5.0,
               "VOCABULARY_SIZE": 900, "BASELINE_STEPS": 10, "TEST_SENTENCES": 3}  # fmt: skip
    given = [f"{name} = {value}" for name, value in changed.items()]
    made = config.load(["corpus.gin"], given).experiment()
    model = model_of(made, {"vocab_size": 900}, 6)
    assert (model.width, model.encoder_layers, model.decoder_layers) == (64, 6, 6)
    assert model.moe_every == 1
    experts = model.encoder_experts
    assert experts is not None
    assert getattr(experts.gate, "__name__", "") == "switch"
    assert made.baselines is not None
    small = model_of(made.baselines.low, {"vocab_size": 900}, 2)
    assert (small.width, small.encoder_layers, small.moe) == (64, 2, None)
    assert made.baselines.low.training.total_steps == 10
    assert made.decoding.test_sentences == 3


def wrong_column(here: Path) -> None:
    folders.tsv(here / "corpus", swapped="gl")


def without_english(here: Path) -> None:
    folders.tsv(here / "corpus")
    for split in ("train", "dev", "test"):
        lines = [f"der Hund und das Haus {n}\tle chien et la maison {n}\n" for n in range(30)]
        write(here / "corpus" / f"de-fr.{split}.tsv", "".join(lines))


def empty(here: Path) -> None:
    (here / "corpus").mkdir()


BAD: dict[Callable[[Path], None], str] = {
    empty: "corpus: expected sentence pairs, .*; saw no files",
    wrong_column: "saw it on the other side of gl",
    without_english: "corpus: de_fr: the text of en is not English; other pairs are named by",
}


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_mistake_is_one_line_that_says_what_was_expected_and_seen(
    make: Callable[[Path], None], here: Path
) -> None:
    make(here)
    assert re.search(BAD[make], new("corpus", "--yes").mistake)
    assert not (here / "corpus.gin").exists()


def test_the_gin_file_goes_beside_the_folder_never_into_it(here: Path) -> None:
    folders.tsv(here / "corpus")
    assert "into corpus; --out=mine.gin" in new("corpus", "--out=corpus/mine.gin").mistake
    assert "no folder" in new("corpus", "--out=nowhere/mine.gin").mistake
    assert "FOLDER = 'nowhere': must be a folder that exists" in new("nowhere").mistake
    assert "reads no config" in new("corpus", "--gin.TRAIN_STEPS=3").mistake


def test_english_in_the_second_column_of_every_file_is_found(here: Path) -> None:
    folders.tsv(here / "corpus", swapped="gl fy pt")
    assert "English: column 2" in new("corpus", "--yes").out
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
    for each in commands_of(new("corpus", "--yes").ok()):
        config.load(["corpus.gin"], parse(each[1:]).gin_bindings).experiment()
    assert config.load(["corpus.gin"]).experiment().data.corpus.languages == ["gl"]
    for path in [*(here / "corpus").iterdir()]:
        path.rename(path.with_name(path.name.replace("gl", "gl~bt")))
    assert "text like gl~bt is never tested" in new("corpus", "--out=b.gin", "--yes").mistake


def test_minutes_are_a_flag_and_the_same_call_writes_the_same_file(here: Path) -> None:
    folders.tsv(here / "corpus")
    texts = []
    for _ in range(2):
        assert "assumed" not in new("corpus", "--yes", "--minutes=1", "--out=a.gin").out
        texts.append((here / "a.gin").read_text(encoding="utf-8"))
        (here / "a.gin").unlink()
    assert texts[0] == texts[1]
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
    plain = new(make(here / "plain").name, "--yes").ok()
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
    assert more["steps"] > 10 * many["steps"] > 10 * 2000
    # Equal work a token: a layer of 4 M and two experts of 4 M are as two layers of two of 3 M.
    assert [(of["moe_every"], of["mlp_width"]) for of in (few, more)] == [(2, 1024), (1, 384)]


# -------- --start: a second config, which continues from a model on the same test sets


HF = ROOT / "tests" / "testdata" / "hf"


@pytest.fixture
def there(here: Path) -> Path:
    write_corpus(here / "corpus")
    return here


def begun(start: str, *more: str) -> Said:
    return new("corpus", "--out=pairs.gin", "--yes", f"--start={start}", *more)


def held_out_of(spec: CorpusSpec, folder: Path) -> dict[tuple[str, str], list]:
    cache = spec.build(folder)
    return {(code, split): [*cache.pairs(code, split)]
            for code in cache.language_pairs() for split in ("dev", "test")}  # fmt: skip


@pytest.mark.parametrize("name", ["mt5", pytest.param("madlad", marks=pytest.mark.thorough)])
def test_a_pretrained_model_is_continued_on_the_same_test_sets(name: str, there: Path) -> None:
    shutil.copytree(HF / name, there / name)
    said = begun(name).ok()
    assert "wrote pairs.gin and pairs_continued.gin" in said.out
    scratch = config.load(["pairs.gin"]).experiment()
    continued = config.load(["pairs_continued.gin"]).experiment()
    sizes = {"vocab_size": 640}
    assert (model_of(continued, sizes, 6).width, continued.baselines) == (32, None)
    assert continued.training.initial is not None
    assert continued.training.early_stopping is not None
    assert continued.training.early_stopping.by_chrf
    assert continued.training.optimizer(10)
    # The same sentences and the same search: what is compared.
    made = [held_out_of(one.data.corpus, there / "data") for one in (scratch, continued)]
    assert made[0] == made[1]
    assert {code for code, _ in made[0]} == {"en-es", "en-gl", "en-fy"}
    assert scratch.decoding.translated() == continued.decoding.translated()
    assert continued.decoding.max_source_length >= max(
        one.data.corpus.lengths["inputs"] for one in (scratch, continued)
    )
    for words in commands_of(said):  # docs/initial.md runs such
        parse(words[1:])


def test_a_run_is_continued_and_what_it_knew_is_kept(first: Path, there: Path) -> None:
    """es, pt and gl are known; the folder has es, gl and fy."""
    said = begun(str(first)).ok()
    made = config.load(["pairs_continued.gin"]).experiment()
    spec = made.data.corpus
    assert (spec.languages, made.data.keep, made.data.keep_share) == (
        ["es", "gl", "fy", "pt"], ["pt"], 0.9)  # fmt: skip
    model = model_of(made, {"vocab_size": 640}, 8)
    assert (model.width, model.encoder_layers, model.moe_every) == (16, 1, 1)
    assert model.encoder_experts is not None
    assert model.encoder_experts.num_experts == 4
    old = config.load([first / "config.gin"], model_dir=first).experiment()
    source = spec.opened_source
    assert isinstance(source, Joined)
    for split in ("dev", "test"):
        assert [*source.pairs("pt", split)] == [
            *old.data.corpus.opened_source.pairs("pt", split)]  # fmt: skip
    # One tag more, and room for pieces of one language.
    assert spec.vocabulary_size in range(400, 400 + 129)
    for words in commands_of(said):  # docs/initial.md runs such
        parse(words[1:])


def test_what_cannot_be_continued_is_one_line_before_anything_is_read(there: Path) -> None:
    (there / "empty").mkdir()
    assert "empty: neither a trained run of m4 (run.json, vocabulary/) nor a model in" in (
        begun("empty").mistake)  # fmt: skip
    assert "nowhere" in begun("nowhere").mistake
    shutil.copytree(HF / "mt5", there / "mt5")
    (there / "mt5" / "spiece.model").unlink()
    assert "mt5" in begun("mt5").mistake
    (there / "pairs_continued.gin").write_text("")
    assert "pairs_continued.gin: is there, and is never written over" in begun("mt5").mistake
    assert not (there / "pairs.gin").exists()
