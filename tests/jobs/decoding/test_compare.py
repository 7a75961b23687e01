"""`m4 report RUN_A RUN_B --baseline=RUN_C`, on folders of hypotheses that no model made."""

import gzip

import pytest

from m4.storage.files import read_jsonl, write_jsonl
from tests.command_line import contents, m4

PAIRS = {"pt": 4000, "gl": 250, "he": 150}
TEXTS = [f"{n} Swiss francs per hour on May {n}" for n in range(1, 13)]


def write_run(folder, cut, languages=PAIRS, decodes="decodes", texts=TEXTS):
    """Writes a run whose translations lack their last words, with the languages' sizes."""
    for code in languages:
        rows = [{"source": f"x {t}", "reference": t, "hypothesis": " ".join(t.split()[:cut])}
                for t in texts]  # fmt: skip
        write_jsonl(folder / decodes / f"test.{code}-en.jsonl", rows)
    about = {"system": "moe", "subset": "all", "score": 9, "low": 8, "high": 9, "sentences": 12}
    about = {**about, "metric": "bleu", "signature": f"nrefs:1|version:2.{cut}"}
    scores = [{"direction": f"{c}-en", "train_pairs": PAIRS[c], **about} for c in languages]
    write_jsonl(folder / "scores.jsonl", scores)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "moe_8", 7)
    write_run(folder / "dense", 6)
    write_run(folder / "c", 8)
    write_run(folder / "c", 5, decodes="decodes/bilingual")
    return folder


def test_a_page_for_each_test_set(runs, tmp_path):
    """Two runs on test sets of their own: pages that lead to each other, with their own scores."""
    for name, cut in (("moe_8", 7), ("dense", 6)):
        folder = write_run(tmp_path / name, cut, languages=["gl"]) / "decodes"
        write_jsonl(folder / "flores.gl-en.jsonl", read_jsonl(folder / "test.gl-en.jsonl")[:6])
    words = [str(tmp_path / name) for name in ("dense", "moe_8")]
    m4("report", *words, f"--output={tmp_path}/out", "--testsets=test,flores").ok()
    for folder, link, sentences in (
        ("", "flores/report.html", 12),
        ("flores", "../report.html", 6),
    ):
        text = (tmp_path / "out" / folder / "report.html").read_text(encoding="utf-8")
        assert f'<a href="{link}">' in text
        (row,) = [row for row in read_jsonl(tmp_path / "out" / folder / "deltas.jsonl")
                  if row["metric"] == "bleu"]  # fmt: skip
        assert row["sentences"] == sentences
        assert row["delta"] > 0
    m4("report", *words, f"--output={tmp_path}/ter", "--metrics=ter,exact_match").ok()
    rows = {row["metric"]: row for row in read_jsonl(tmp_path / "ter" / "deltas.jsonl")}
    assert rows["ter"]["delta"] < 0 == rows["exact_match"]["delta"]  # fewer edits, none right
    assert (tmp_path / "ter" / "delta_ter.svg").is_file()
    said = m4("report", *words, f"--output={tmp_path}/other", "--testsets=ntrex")
    assert "dense: no translations of ntrex; make them with " in said.mistake
    assert "--testset=ntrex" in said.mistake
    said = m4("report", *words, f"--output={tmp_path}/other", "--testsets=../x")
    assert "--testsets=../x: must be names with commas between them" in said.mistake


def refused(runs, *words):
    said = m4("report", *(str(word) for word in words), f"--output={runs}/out")
    assert not (runs / "out").exists()
    return said.mistake.replace(str(runs), "")


def test_one_page_of_several_runs_against_the_baselines_of_another(runs, tmp_path):
    before = contents(runs)
    words = [runs / "moe_8", f"plain={runs}/dense", f"--baseline={runs}/c"]
    said = m4("report", *words, f"--output={tmp_path}/out", "--levels=3000,200,5").ok()
    assert contents(runs) == before
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {
        "delta_bleu.png", "delta_bleu.svg",
        "deltas.jsonl", "rates.jsonl", "report.html", "scores.jsonl", "winners.jsonl",
    }  # fmt: skip
    rows = read_jsonl(tmp_path / "out" / "deltas.jsonl")
    assert {(row["system"], row["baseline"]) for row in rows} == {
        ("moe_8", "bilingual"), ("plain", "bilingual")}  # fmt: skip
    assert {row["language"]: row["train_pairs"] for row in rows} == PAIRS
    deltas = {(row["language"], row["system"]): row["delta"] for row in rows}
    assert all(deltas[code, "moe_8"] > deltas[code, "plain"] > 0 for code in PAIRS)
    rates = read_jsonl(tmp_path / "out" / "rates.jsonl")
    assert [row["system"] for row in rates[:4]] == ["reference", "moe_8", "plain", "bilingual"]
    assert "moe_8 against bilingual" in said.out


def test_a_folder_of_translations_is_itself_and_may_be_gzipped(runs, tmp_path, monkeypatch):
    kept = tmp_path / "results"
    for name in ("moe_8", "dense"):
        for path in (runs / name / "decodes").iterdir():
            packed = kept / name / f"{path.name}.gz"
            packed.parent.mkdir(parents=True, exist_ok=True)
            packed.write_bytes(gzip.compress(path.read_bytes()))
    (kept / "dense" / "test.he-en.jsonl.gz").unlink()
    # One file of scores for all has the training sizes; of c the model itself is the baseline.
    (kept / "scores.jsonl").write_bytes((runs / "dense" / "scores.jsonl").read_bytes())
    (kept / "dense" / "operative_config.gin").write_text("A = 1\n", encoding="utf-8")
    monkeypatch.chdir(kept)
    words = ["moe_8", "dense", f"--baseline=best={runs}/c/decodes"]
    said = m4("report", *words, f"--output={tmp_path}/out").ok()
    rows = read_jsonl(tmp_path / "out" / "deltas.jsonl")
    assert {(row["system"], row["baseline"]) for row in rows} == {
        ("moe_8", "best"), ("dense", "best")}  # fmt: skip
    assert all(row["delta"] < 0 for row in rows)
    scores = read_jsonl(tmp_path / "out" / "scores.jsonl")
    assert {row["config"] for row in scores} == {None, "dense/operative_config.gin"}
    # Only what all have translated is compared.
    assert said.err == "left out, not translated by all: he-en\n"
    assert {row["language"] for row in rows} == {"pt", "gl"}
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Each of 2 languages is translated by moe_8, dense" in page


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("RUNS/dense RUNS/moe_8 --baseline=moe_8", ("dense", "moe_8")),
        ("a=RUNS/moe_8 b=RUNS/dense --baseline=RUNS/moe_8", ("b", "a")),
        ("a=RUNS/c --baseline=a", ("a", "bilingual")),
        ("RUNS/c RUNS/moe_8", ("moe_8", "c")),  # though c has bilingual baselines
    ],
)
def test_the_baseline_may_be_one_of_the_runs(runs, tmp_path, words, found):
    m4("report", *words.replace("RUNS", str(runs)).split(), f"--output={tmp_path}/out").ok()
    rows = read_jsonl(tmp_path / "out" / "deltas.jsonl")
    assert {(row["system"], row["baseline"]) for row in rows} == {found}


def test_what_cannot_be_compared_is_one_line(runs, tmp_path):
    a, c = runs / "moe_8", f"--baseline={runs}/c"
    other = write_run(tmp_path / "other", 7, texts=[*TEXTS[:-1], "another"])
    assert "other test sentences than those of" in refused(runs, a, other, c)
    apart = write_run(tmp_path / "apart", 7, ["pt"])
    (apart / "decodes" / "test.pt-en.jsonl").rename(apart / "decodes" / "test.en-pt.jsonl")
    assert refused(runs, a, apart, c) == (
        "m4 report: no direction is translated by all of moe_8, apart, bilingual"
    )
    (runs / "empty").mkdir(exist_ok=True)
    assert "/empty: no translations" in refused(runs, a, runs / "empty", c)
    assert "/nowhere: no such folder" in refused(runs, a, runs / "nowhere", c)
    assert "/moe_8: the name 'moe_8' is taken" in refused(runs, a, a, c)
    assert "reads folders on this machine" in refused(runs, a, "gs://b/run", c)
    assert "/moe_8: is compared with itself" in refused(runs, a, f"--baseline={a}")


def test_arguments_that_do_not_go_together(runs):
    a, c = runs / "moe_8", f"--baseline={runs}/c"
    assert "no config.gin there; train first" in m4("report", str(a)).mistake
    assert "RUN_A RUN_B --baseline=RUN_C" in m4("report", c).mistake
    assert "not with several runs" in m4("report", str(a), c, "--gin.A=1").mistake
    assert "three numbers" in m4("report", str(a), c, "--levels=1,2,x").mistake
    assert "--output: only for a report on several" in m4("report", str(a), "--output=x").mistake
    assert "give one of them" in m4("report", str(a), f"--model_dir={a}").mistake
    (runs / "c" / "run.json").write_text("{}", encoding="utf-8")
    said = m4("report", str(a), c, f"--output={runs}/c").mistake
    (runs / "c" / "run.json").unlink()
    assert "whose own report is there" in said
