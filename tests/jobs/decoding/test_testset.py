"""A test set of its own: translated and scored without the corpus, document by document."""

import shutil
import sys
from pathlib import Path

import pytest
from sacrebleu.metrics.chrf import CHRF

from m4.data.cache.cache import Cache
from m4.storage.files import read_jsonl
from tests.command_line import TINY, Said, contents, m4

CONFIG = """from m4.data import testsets
OWN = 'own'
experiment.Experiment.testsets = {'news': @testsets.Table()}
testsets.Table.folder = %OWN
testsets.Table.files = '{pair}.tsv'
testsets.Table.header = ['source', 'a', 'b', 'document']
testsets.Table.target = ['a', 'b']
testsets.Table.document = 'document'
"""


@pytest.fixture(scope="module")
def files(own: Path) -> Path:
    """Writes two sentences, the first also in training, and a third in another document."""
    folder = own.parent / "own"
    folder.mkdir()
    cache = Cache(next(path for path in (own / "data").iterdir() if path.is_dir()))
    known = next(cache.pairs("gl", "train"))
    rows = [(known[0].upper(), "un", "dous", "d1"), ("No news", "Nada", "Ren", "d1"),
            ("A  word\u00a0more", "Unha palabra", "Outra", "d2")]  # fmt: skip
    (folder / "en-gl.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    (own.parent / "news.gin").write_text(CONFIG)
    return folder


def ask(command: str, own: Path, files: Path, *more: str, file: str = "news.gin") -> Said:
    return m4(command, str(own), f"--testset={files.parent / file}", f"--gin.OWN={files}", *more)


@pytest.mark.slow
def test_scores_with_several_references_documents_and_seen_sentences(
    own: Path, files: Path
) -> None:
    said = ask("eval", own, files, "--beams=1").ok()
    assert "testset news: has no references for en-es, en-pt" in said.err
    assert "news: sentences of training text, which subset unseen leaves out: en-gl 1" in said.err
    folder = own / "decodes" / "beams=1"
    decodes = read_jsonl(folder / "news.en-gl.jsonl")
    assert [row["source"] for row in decodes][2] == "A  word\u00a0more"  # as it is in the file
    assert decodes[1]["references"] == ["Nada", "Ren"]
    rows = {
        (r["system"], r["metric"], r["subset"]): r for r in read_jsonl(folder / "scores.news.jsonl")
    }
    hypotheses = [row["hypothesis"] for row in decodes]
    columns = [list(column) for column in zip(*(row["references"] for row in decodes), strict=True)]
    expected = CHRF().corpus_score(hypotheses, columns).score
    assert rows["moe", "chrf", "all"]["score"] == pytest.approx(expected, abs=1e-6)
    assert "nrefs:2" in rows["moe", "chrf", "all"]["signature"]
    sentences = {subset: rows["moe", "bleu", subset]["sentences"] for _, _, subset in rows}
    assert sentences == {"all": 3, "seen": 1, "unseen": 2}
    documents = [r for r in read_jsonl(folder / "scores_by_document.news.jsonl")
                 if (r["system"], r["metric"]) == ("moe", "chrf")]  # fmt: skip
    assert [(r["document"], r["sentences"]) for r in documents] == [("d1", 2), ("d2", 1)]
    last = CHRF().corpus_score(hypotheses[2:], [column[2:] for column in columns]).score
    assert documents[1]["score"] == pytest.approx(last, abs=1e-6)


@pytest.mark.slow
def test_neither_corpus_nor_training_is_needed(own: Path, files: Path) -> None:
    alone = Path(shutil.copytree(own, own.parent / "alone"))
    shutil.rmtree(alone / "data")
    shutil.rmtree(alone / "decodes", ignore_errors=True)
    said = ask("decode", alone, files, "--beams=1").ok()
    assert f"eval --testset={own.parent / 'news.gin'} --model_dir=" in said.out
    assert not (alone / "data").exists()
    said = ask("eval", alone, files, "--beams=1").ok()
    assert "news: not compared with the training text" in said.err
    rows = read_jsonl(alone / "decodes" / "beams=1" / "scores.news.jsonl")
    assert {row["subset"] for row in rows} == {"all"}
    assert not (alone / "data").exists()


@pytest.mark.slow
def test_every_checkpoint_on_a_test_set(own: Path, files: Path) -> None:
    ask("eval", own, files, "--beams=1", "--steps=2,4", "--directions=en-gl").ok()
    rows = read_jsonl(own / "decodes" / "beams=1" / "scores_by_step.jsonl")
    assert {(row["split"], row["step"]) for row in rows} == {("news", 2), ("news", 4)}


def test_a_saved_scorer_runs_where_it_is_given_again(
    own: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of a run's config is data; what is typed is the user's own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    copy = Path(shutil.copytree(own, tmp_path / "run"))
    saved = (copy / "config.gin").read_text(encoding="utf-8")
    ran = tmp_path / "ran"
    lines = [
        "from m4.eval.metrics import external",
        "experiment.Decoding.metrics = (@external.External(),)",
        "external.External.name = 'letters'",
        f"external.External.command = ['touch', {str(ran)!r}]",
    ]
    (copy / "config.gin").write_text("\n".join([saved, *lines, ""]), encoding="utf-8")
    before = contents(copy)
    assert "a run folder is data" in m4("eval", copy, "--beams=1", "--sentences=2").mistake
    assert not ran.exists()
    assert contents(copy) == before  # nothing was translated
    words = [sys.executable, str(TINY.with_name("stand_in_scorer.py"))]
    ask("eval", copy, files, "--beams=1", f"--gin.external.External.command={words}").ok()
    rows = read_jsonl(copy / "decodes" / "beams=1" / "scores.news.jsonl")
    assert {row["metric"] for row in rows} == {"letters"}


def test_mistakes_are_one_line(own: Path, files: Path) -> None:
    (own.parent / "empty.gin").write_text(CONFIG.replace("'news'", "'empty'"))
    empty = own.parent / "lacking"
    empty.mkdir()
    (empty / "en-gl.tsv").write_text("hello\t\t\td1\n")
    (own.parent / "test.gin").write_text(CONFIG.replace("'news'", "'test'"))
    for said, message in [
        (m4("eval", str(own), "--testset=flores"), "--testset=flores: this run's config has none"),
        (ask("eval", own, empty, file="empty.gin"), "en-gl has no reference of segment 1 of 1"),
        (ask("eval", own, files, file="test.gin"), "Experiment.testsets"),
        (ask("eval", own, files, "--steps=all", "--directions=gl-en"), "has none of the model's"),
    ]:
        assert said.status == 2, said.out
        assert message in said.err.splitlines()[-1], said.err
