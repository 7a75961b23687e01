"""`python -m scripts.results`: what is kept of runs, drawn again, and put back for baselines."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from m4.data.corpus import CorpusSpec
from m4.eval.decoding.hypotheses import decode_to_files
from m4.eval.decoding.settings import DEFAULTS
from m4.eval.decoding.testsets import split_pairs
from m4.eval.metrics import bootstrap
from m4.eval.scoring.delta import BILINGUAL, averages, deltas, from_plain, plain
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import System, measure
from m4.experiment import Baselines, Data, Decoding, Experiment, Training
from m4.jobs.bilingual import find_baselines, plans_of
from m4.jobs.corpus import open_corpus
from m4.settings import InputError
from m4.storage import run_folder
from m4.storage.files import read_jsonl, write_json, write_jsonl
from m4.train.optimizer import adamw
from scripts.results import kept, page, restore, starts, summary
from scripts.results.__main__ import main
from scripts.results.found import computed, read
from tests.data.corpus import Made
from tests.jobs.test_baselines import MODEL, TRAINING
from tests.scripts.conftest import ASKED
from tests.storage.conftest import config_of

SIZES = {"de": 90, "gl": 60, "mt": 40}
EXPERIMENT = f"""{ASKED}baselines = "runs/baselines"
[runs]
dense = "runs/dense"
moe = "runs/moe"
late = "runs/late"
"""
CONFIG = {
    "corpus.CorpusSpec.mixture": "'to_english'",
    "experiment.ResourceLevels.high_resource_from": "80",
    "experiment.ResourceLevels.low_resource_below": "50",
    "experiment.ResourceLevels.min_test_sentences": "5",
}
LEVELS = ResourceLevels(80, 50, 5)


def experiment_in(base: Path) -> Experiment:
    corpus = CorpusSpec(Made(SIZES, held_out=12), mixture="to_english", vocabulary_size=320)
    data = Data(corpus, data_dir=str(base / "data"))
    of_a_pair = dataclasses.replace(data, corpus=dataclasses.replace(corpus, vocabulary_size=300))
    one = Experiment("unused", of_a_pair, TRAINING, MODEL, vocabulary_multiple=8)
    baselines = Baselines(one, one, one, str(base / "baselines"))
    moe = str(base / "moe")
    return Experiment(
        moe, data, Training(8, 8, adamw), decoding=Decoding(2, 0.6, 128, 8, 40), baselines=baselines
    )


def decode(folder: Path, words: int, experiment: Experiment, directions: Sequence[str]) -> None:
    """Writes translations, the first words of the references, as a job writes them."""
    cache = open_corpus(experiment)
    pairs = split_pairs(cache, directions, "test")
    cut = iter([" ".join(y.split()[:words]) for each in pairs.values() for _, y in each])

    def translate(sources: list[str], _: list[str]) -> list[dict[str, str]]:
        return [{"hypothesis": next(cut)} for _ in sources]

    decode_to_files(translate, folder, "test", pairs, {"step": 8})


def train_baselines(experiment: Experiment, languages: Sequence[str]) -> None:
    """Writes what finished baselines leave."""
    plans = plans_of(experiment, open_corpus(experiment))
    for language in languages:
        plan = plans[language]
        decode(plan.folder / "decodes", 3, experiment, [f"{language}-en"])
        note = {"best_step": 4, "step": 4, "seconds_in_steps": 1800.0}
        translated = experiment.decoding.translated()
        result = {"identity": plan.identity, "translated": translated, "note": note}
        more = {"stopped_early": True, "gain_last_quarter": 0.5}
        write_json(plan.folder / "result.json", {**result, **more}, indent=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes runs/, in which dense and moe are translated and late is in training.

    Two of three bilingual models are finished.
    """
    base = tmp_path_factory.mktemp("base") / "runs"
    experiment = experiment_in(base)
    directions = [f"{language}-en" for language in SIZES]
    open_corpus(experiment)
    for name, words in {"dense": 4, "moe": 6, "late": None}.items():
        text = "TEXT_DIR = '/home/me/texts/tatoeba'\n"
        run_folder.claim(base / name, **config_of(CONFIG, text))
        (base / name / "vocabulary").mkdir()
        (manifest,) = base.glob("data/*/manifest.json")
        shutil.copy(manifest, base / name / "vocabulary")
        rows = [{"step": 10 * n, "step_seconds": 3.6, "nll": 2.0, "nll/high": 2.0, "nll/de-en": 2.0,
                 "load/0": 0.5, **({"dev/nll": 2.0} if n == 7 else {})}
                for n in range(1, 151)]  # fmt: skip
        write_jsonl(base / name / "metrics.jsonl", rows)
        if words:
            decode(base / name / "decodes", words, experiment, directions)
    train_baselines(experiment, ["de", "gl"])
    return base.parent


def with_a_table(base: Path) -> Path:
    """Writes an empty results/ in base, and docs/results.md."""
    (base / "results").mkdir()
    (base / "docs").mkdir()
    table = f"# Results\n{summary.BEGIN}\n{summary.END}\n"
    (base / "docs" / "results.md").write_text(table, encoding="utf-8")
    return base / "results"


@pytest.fixture(scope="module")
def results(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of results, with what is kept of the runs."""
    folder = with_a_table(tmp_path_factory.mktemp("kept"))
    (folder / "e1").mkdir()
    (folder / "e1" / "experiment.toml").write_text(EXPERIMENT, encoding="utf-8")
    assert main(["keep", "e1", f"--base={runs}", f"--results={folder}"]) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}  # fmt: skip


def test_kept_counts_give_the_numbers_of_the_translations(results: Path, runs: Path) -> None:
    """Compares with `m4 report`, which has the references."""
    found = read(results / "e1")
    check_drawn(results / "e1")
    gathered = results / "gathered"
    gathered.mkdir()
    for path in (runs / "runs" / "baselines").glob("*/decodes/*.jsonl"):
        shutil.copy(path, gathered)
    systems = [System(name, runs / "runs" / name / "decodes") for name in ("dense", "moe")]
    measured = measure([*systems, System("bilingual", gathered)], DEFAULTS.metrics)
    for metric, one in zip(("bleu", "chrf"), found.compared[:2], strict=True):
        assert (one.baseline, one.metric) == ("bilingual", metric)
        expected = deltas(measured, SIZES, metric)
        assert one.rows == expected
        assert one.means == averages(expected, LEVELS)
    assert {row.language for row in found.compared[0].rows} == {"de", "gl"}
    # Against the dense model all languages count: no bilingual model is needed.
    dense = found.compared[2]
    assert dense.baseline == "dense"
    assert [(m.system, m.languages) for m in dense.means if m.level == "all"] == [("moe", 3)]
    seeds = {"seeds": {"dense": ["dense"], "moe": ["missing", "moe"]}}  # moe is of another seed
    asked = dataclasses.replace(found.asked, curves=seeds)
    compared = computed(asked, found.systems, found.sizes, found.levels)
    assert {one.baseline for one in compared} == {"bilingual"}


def test_no_sentence_and_no_path_is_kept(results: Path, runs: Path) -> None:
    pairs = split_pairs(open_corpus(experiment_in(runs / "runs")), ["de-en", "mt-en"], "test")
    texts = b"\n".join(contents(results / "e1").values()).decode("utf-8", "replace")
    packed = [row["hypothesis"] for name in ("dense", "moe", "bilingual") for row in
              read_jsonl(kept.of(results / "e1", name) / "hypotheses.jsonl.gz")]  # fmt: skip
    for source, reference in [pair for each in pairs.values() for pair in each]:
        assert source not in texts
        assert reference not in texts
        # The translations of this test are at most six words; longer references are not whole.
        assert (reference in packed) == (len(reference.split()) <= 6)
    assert not kept.read(results / "e1", "copy").hypotheses
    assert "/home" not in texts
    assert "TEXT_DIR = 'tatoeba'" in texts


def test_a_second_call_changes_nothing_and_a_later_one_adds(
    results: Path, runs: Path, tmp_path: Path
) -> None:
    again = with_a_table(tmp_path)
    shutil.copytree(results / "e1", again / "e1")
    words = ["keep", "e1", f"--base={runs}", f"--results={again}"]
    assert main(words) == 0
    assert contents(again / "e1") == contents(results / "e1")
    # On another machine only the missing model is trained; the runs are gone.
    later = tmp_path / "later" / "runs"
    shutil.copytree(runs / "runs" / "data", later / "data")
    train_baselines(experiment_in(later), ["mt"])
    words[2] = f"--base={tmp_path / 'later'}"
    assert main(words) == 0
    text = (again / "e1" / "README.md").read_text(encoding="utf-8")
    assert "3 of 3 bilingual models; dense: step 8; moe: step 8;" in text
    before, after = (kept.read(at / "e1", "bilingual") for at in (results, again))
    assert set(after.directions) == {"de-en", "gl-en", "mt-en"}
    assert after.hypotheses["de-en"] == before.hypotheses["de-en"]
    # Other test sentences: nothing is mixed.
    row = json.loads((kept.of(again / "e1", "moe") / "directions.jsonl").read_text().split("\n")[0])
    about = kept.read(again / "e1", "moe")
    about.directions[row["direction"]]["test_sha256"] = "0"
    kept.write(again / "e1", about)
    with pytest.raises(InputError, match="other test sentences of de-en"):
        read(again / "e1")


def test_restored_baselines_are_found_again(results: Path, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "runs" / "data", tmp_path / "data")
    experiment = experiment_in(tmp_path)
    assert restore.restore(results / "e1", experiment) == ["2 baselines written, 0 were there"]
    assert restore.restore(results / "e1", experiment) == ["0 baselines written, 2 were there"]
    cache = open_corpus(experiment)
    with pytest.raises(InputError, match="no bilingual baseline of mt"):
        find_baselines(experiment, cache)
    train_baselines(experiment, ["mt"])
    found = find_baselines(experiment, cache)
    for name in ("de", "gl"):
        before = runs / "runs" / "baselines" / found[name].folder.name
        kept_files = {path.relative_to(before): path for path in before.rglob("*.json*")}
        assert Path("result.json") in kept_files
        for inside, path in kept_files.items():
            assert (found[name].folder / inside).read_bytes() == path.read_bytes()


COMMITTED = sorted(path.parent for path in kept.RESULTS.glob("*/experiment.toml"))


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_committed_results_are_as_they_would_be_drawn(folder: Path) -> None:
    check_drawn(folder)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 15e6


def test_the_table_of_experiments_is_as_it_would_be_drawn() -> None:
    text = (kept.RESULTS.parent / "docs" / "results.md").read_text(encoding="utf-8")
    assert summary.with_table(text, COMMITTED) == text, "run: make results"


def check_drawn(folder: Path) -> None:
    """Compares scores, differences and a few intervals with the counts, and pages with them."""
    found = read(folder, again=False)
    assert (folder / "README.md").read_text(encoding="utf-8") == page.text(found), "make results"
    counted = kept.measured(found.systems).statistics if found.systems else {}
    values = {at: one.value() for at, one in counted.items()}
    scores = read_jsonl(folder / "scores.jsonl") if found.systems else []
    assert {(row["system"], row["direction"], row["metric"]): row["score"] for row in scores} == {
        at: pytest.approx(value, abs=1e-6) for at, value in values.items()}  # fmt: skip
    if len(found.systems) > 2:  # two, and the copy
        assert found.compared or found.zero_shot
    if (path := folder / "deltas.jsonl").is_file():  # no field has a default for want of its own
        rows = read_jsonl(path)
        assert [row.keys() for row in plain(from_plain(rows))] == [row.keys() for row in rows]
    for of in found.zero_shot:
        if of.directions == 1:
            ours, theirs = (values[name, of.about, of.metric] for name in (of.system, of.against))
            assert (of.score, of.other) == (pytest.approx(ours), pytest.approx(theirs))
            assert of.delta == pytest.approx(ours - theirs, abs=1e-9)
        else:
            at = (of.system, of.against, of.metric, 1)
            each = [one.delta for one in found.zero_shot
                    if (one.system, one.against, one.metric, one.directions) == at]  # fmt: skip
            assert (len(each), np.mean(each)) == (of.directions, pytest.approx(of.delta))
    for of in found.starts:
        against = found.asked.starts["old"] if of.about == "forgotten" else BILINGUAL
        at = {(run, against, of.metric) for run in found.asked.starts["seeds"][of.start]}
        each = [row.delta for one in found.compared for row in one.rows
                if (row.system, row.baseline, row.metric) in at
                and of.about in ("gain", "forgotten", row.language)]  # fmt: skip
        assert of.mean == pytest.approx(np.mean(each))
        assert of.low < of.mean < of.high
    for one in found.compared:
        for number, row in enumerate(one.rows):
            ours = counted[row.system, row.direction, row.metric]
            theirs = counted[row.baseline, row.direction, row.metric]
            assert row.delta == pytest.approx(ours.value() - theirs.value(), abs=1e-9)
            if number % 40 == 0:
                again = bootstrap.paired_difference(ours, theirs)
                assert (row.low, row.high) == pytest.approx((again.low, again.high), abs=1e-9)
        for mean in one.means:
            rows = [row.delta for row in one.rows if row.system == mean.system
                    and mean.level in ("all", found.levels.of(row.train_pairs))
                    and row.sentences >= found.levels.min_test_sentences]  # fmt: skip
            assert (len(rows), np.mean(rows)) == (mean.languages, pytest.approx(mean.delta))


def test_the_seconds_of_a_killed_call_count(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "cost.jsonl", [{"name": "a", "cpu_seconds": each} for each in (81, 9)])
    assert starts.cpu_seconds(tmp_path / "cost.jsonl") == {"a": 90}


def test_what_is_asked_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e1" / "experiment.toml"
    path.parent.mkdir()
    unfinished = EXPERIMENT.replace('verdict = "open"\n', "")
    for text, said in ((None, "missing; it says what is asked"), (unfinished, "no verdict")):
        if text is not None:
            path.write_text(text, encoding="utf-8")
        assert main(["keep", "e1", f"--results={tmp_path}"]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
