"""`m4 new --start`: a second config, which continues from a model on the same test sets."""

import shlex
import shutil
from pathlib import Path

import pytest

from m4 import config
from m4.cli.arguments import parse
from m4.data.corpus import CorpusSpec
from m4.data.sources.joined import Joined
from m4.jobs import new_config
from m4.storage.files import read_jsonl
from tests.command_line import Said, m4
from tests.documents.blocks import ROOT
from tests.documents.world import write_corpus

HF = ROOT / "tests" / "testdata" / "hf"
TRIAL = ["--gin.TRAIN_STEPS=2", "--gin.WIDTH=16", "--gin.HEADS=1", "--gin.LAYERS=2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_config, "available_cpus", lambda: {0, 1})
    write_corpus(tmp_path / "corpus")
    return tmp_path


def new(start: str, *more: str) -> Said:
    return m4("new", "corpus", "--out=pairs.gin", "--yes", f"--start={start}", *more)


def commands_of(said: Said) -> dict[str, list[str]]:
    lines = said.out.splitlines()
    return {lines[i - 1].removeprefix("# "): shlex.split(line)
            for i, line in enumerate(lines) if line.startswith("m4 ")}  # fmt: skip


def held_out_of(spec: CorpusSpec, folder: Path) -> dict[tuple[str, str], list]:
    cache = spec.build(folder)
    return {(code, split): [*cache.pairs(code, split)]
            for code in cache.language_pairs() for split in ("dev", "test")}  # fmt: skip


@pytest.mark.parametrize("name", ["mt5", "madlad", "switch"])
def test_a_pretrained_model_is_continued_on_the_same_test_sets(name: str, here: Path) -> None:
    shutil.copytree(HF / name, here / name)
    said = new(name).ok()
    assert "wrote pairs.gin and pairs_continued.gin" in said.out
    scratch = config.load(["pairs.gin"]).experiment()
    continued = config.load(["pairs_continued.gin"]).experiment()
    sizes = {"vocab_size": 640}
    assert (continued.build_model(sizes, 6).width, continued.baselines) == (32, None)
    assert continued.training.initial is not None
    assert continued.training.early_stopping is not None
    assert continued.training.early_stopping.by_chrf
    assert continued.training.optimizer(10)
    # The same sentences and the same search: what is compared.
    made = [held_out_of(one.data.corpus, here / "data") for one in (scratch, continued)]
    assert made[0] == made[1]
    assert {code for code, _ in made[0]} == {"en-es", "en-gl", "en-fy"}
    assert scratch.decoding.translated() == continued.decoding.translated()
    assert continued.decoding.max_source_length >= max(
        one.data.corpus.lengths["inputs"] for one in (scratch, continued)
    )
    for words in commands_of(said).values():
        parse(words[1:])


@pytest.mark.slow
def test_from_the_folder_to_the_winner(here: Path) -> None:
    """The printed commands, with fewer steps."""
    shutil.copytree(HF / "mt5", here / "mt5")
    words = commands_of(new("mt5"))
    short = [*TRIAL, "--gin.BASELINE_STEPS=4"]
    full = words["the full run; the same command resumes it"]
    m4(*full[1:], *short).ok()
    m4(*words["continue from mt5"][1:], TRIAL[0]).ok()
    m4(*words["its translations"][1:]).ok()
    said = m4(*words["which start is the best"][1:], "--levels=140,80,10").ok()
    rows = read_jsonl(here / "runs" / "pairs_continued_report" / "winners.jsonl")
    assert {*rows[0]["scores"]} == {"shared", "continued", "bilingual"}
    assert [row["language"] for row in rows] == ["es", "gl", "fy", "all"]
    lines = said.out.splitlines()
    for what in ("hours", "tokens"):  # of all three
        cells = next(line.split() for line in lines if line.strip().startswith(what))
        assert len(cells) == 4, cells


def test_a_run_is_continued_and_what_it_knew_is_kept(first: Path, here: Path) -> None:
    """es, pt and gl are known; the folder has es, gl and fy."""
    said = new(str(first)).ok()
    made = config.load(["pairs_continued.gin"]).experiment()
    spec = made.data.corpus
    assert (spec.languages, made.data.keep, made.data.keep_share) == (
        ["es", "gl", "fy", "pt"], ["pt"], 0.9)  # fmt: skip
    model = made.build_model({"vocab_size": 640}, 8)
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
    words = commands_of(said)
    for purpose in ("translations of the old model, to see what is forgotten",
                    f"continue from {first}", "its translations"):  # fmt: skip
        m4(*words[purpose][1:], *(TRIAL[:1] if "continue" in purpose else [])).ok()
    said = m4("report", "--model_dir=runs/pairs_continued").ok()
    changes = read_jsonl(here / "runs" / "pairs_continued" / "forgotten.jsonl")
    assert [row["direction"] for row in changes] == ["pt-en", "en-pt"]
    assert "What is forgotten" in said.out


def test_what_cannot_be_continued_is_one_line_before_anything_is_read(here: Path) -> None:
    (here / "empty").mkdir()
    assert "empty: neither a trained run of m4 (run.json, vocabulary/) nor a model in" in (
        new("empty").mistake)  # fmt: skip
    assert "nowhere" in new("nowhere").mistake
    shutil.copytree(HF / "mt5", here / "mt5")
    (here / "mt5" / "spiece.model").unlink()
    assert "mt5" in new("mt5").mistake
    (here / "pairs_continued.gin").write_text("")
    assert "pairs_continued.gin: is there, and is never written over" in new("mt5").mistake
    assert not (here / "pairs.gin").exists()
