"""The full pipeline through the command line: everything is made, and made once."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from m4.data.cache.cache import Cache
from m4.data.preprocess import tag
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.jobs import streams
from m4.storage.files import read_jsonl
from m4.storage.locks import local_lock
from tests.command_line import ALONE, TINY, contents, m4
from tests.shared import DEMO, demo_run

CONFIG = DEMO[1]
LANGUAGES = ("es", "pt", "gl")
DIRECTIONS = [*(f"en-{code}" for code in LANGUAGES), *(f"{code}-en" for code in LANGUAGES)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Returns the folder of a demo, and its output."""
    made, said = demo_run(tmp_path_factory)
    folder = shutil.copytree(made, tmp_path_factory.mktemp("demo") / "world")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAX_NUM_CPU_DEVICES", "1")  # for the baselines' processes
        environment.chdir(folder)
        yield Path("runs/demo"), said.out


@pytest.mark.slow
def test_everything_is_there(first: tuple[Path, str]) -> None:
    folder, said = first
    for name in ("rates.jsonl", "delta_bleu.svg", "checkpoints/2", "vocabulary/manifest.json"):
        assert (folder / name).exists(), name
    for name in ("report.html", "delta_bleu.png", "delta_bleu.svg", "scores.jsonl"):
        assert str(folder / name) in said
    assert str(folder / "operative_config.gin") in said
    # The last line of training: losses by resource group, how fast it was.
    (trained,) = re.findall(r"^train: 4/4 steps .*$", said.replace("\r", "\n"), re.MULTILINE)[-1:]
    for word in (" high ", " low ", " tokens/s"):
        assert word in trained
    for direction in DIRECTIONS:
        rows = read_jsonl(folder / "decodes" / f"test.{direction}.jsonl")
        assert len(rows) == 12
        assert rows[0].keys() == {"source", "reference", "hypothesis"}
    results = sorted(folder.glob("baselines/*/result.json"))
    assert [path.parent.name.split(".")[0] for path in results] == sorted(LANGUAGES)
    assert len(list(folder.glob("baselines/*/decodes/test.*.jsonl"))) == 6


@pytest.mark.slow
def test_every_score_says_how_it_was_computed(first: tuple[Path, str]) -> None:
    folder, _ = first
    rows = read_jsonl(folder / "scores.jsonl")
    # 3 systems x 6 directions x 2 metrics, on all sentences; and on subsets of them.
    whole = [row for row in rows if row["subset"] == "all"]
    assert len(whole) == 3 * 6 * 2
    assert {row["system"] for row in rows} == {"moe", "bilingual", "copy"}
    for row in rows:
        assert re.search(r"nrefs:1\|.*version:2\.", row["signature"]), row
        assert row["low"] <= row["score"] <= row["high"] or row["sentences"] < 12
        if row["system"] != "copy":
            assert Path(row["config"]).is_file()
            assert row["checkpoint_step"] in (2, 4)
    deltas = read_jsonl(folder / "deltas.jsonl")
    assert {(row["direction"], row["baseline"]) for row in deltas} == {
        (direction, "bilingual") for direction in DIRECTIONS
    }


@pytest.mark.slow
def test_a_second_run_makes_nothing_again(first: tuple[Path, str]) -> None:
    folder, _ = first
    operative = (folder / "operative_config.gin").read_text(encoding="utf-8")
    kept = ("data", "checkpoints", "baselines", "decodes", "metrics.jsonl", "scores.jsonl")
    before = {k: v for k, v in contents(folder).items() if k.startswith(kept)}
    code = (
        "import sys\n"
        "from m4.__main__ import main\n"
        "status = main(sys.argv[1:])\n"
        "print('loaded:', {'seqio', 'tensorflow', 'multiprocessing.pool'} & set(sys.modules))\n"
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "demo", CONFIG, f"--model_dir={folder}"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=ALONE)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[-1] == "loaded: set()"
    for stage in ("corpus:", "train:", "baselines:", "steps"):
        assert stage not in said.stdout
    after = {k: v for k, v in contents(folder).items() if k.startswith(kept)}
    assert after == before
    assert (folder / "operative_config.gin").read_text(encoding="utf-8") == operative


@pytest.mark.slow
def test_scores_and_report_are_made_again_from_the_translations(first: tuple[Path, str]) -> None:
    folder, _ = first
    names = ("scores.jsonl", "deltas.jsonl", "report.html", "delta_bleu.png")
    scores = {name: (folder / name).read_text(encoding="utf-8") for name in names[:2]}
    for name in names:
        (folder / name).unlink()
    counts = (folder / "atlas.train.json").rename(folder / "kept.json")
    said = m4("report", CONFIG, f"--model_dir={folder}")
    counts.rename(folder / "atlas.train.json")
    assert said.status == 0, said.err
    (line,) = said.err.splitlines()
    assert line.startswith(f"{folder}/atlas.train.json: missing; the report does not show which")
    assert all((folder / name).is_file() for name in names)
    assert {name: (folder / name).read_text(encoding="utf-8") for name in scores} == scores


@pytest.mark.slow
def test_readers_work_while_a_job_trains(first: tuple[Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(first[0], folder)
    kept = {name: (folder / name).read_bytes() for name in ("run.json", "config.gin")}
    with local_lock(folder / ".lock.train", ""):
        # It has saved a step since the test sets were translated, and writes the next one.
        shutil.copytree(folder / "checkpoints" / "4", folder / "checkpoints" / "5")
        (folder / "checkpoints" / "6.orbax-checkpoint-tmp-3" / "params").mkdir(parents=True)
        for job in (["report"], ["atlas"], ["translate", "--to=en", "a"], ["data", "preview"]):
            m4(*job, f"--model_dir={folder}").ok()
        scores = read_jsonl(folder / "scores.jsonl")
        assert {row["checkpoint_step"] for row in scores if row["system"] == "moe"} == {4}
        for step, at in (([], 5), (["--step=2"], 2)):
            for job in ("decode", "eval"):
                m4(job, f"--model_dir={folder}", *step).ok()
            scores = read_jsonl(folder / ("decodes/2/scores.jsonl" if step else "scores.jsonl"))
            assert {row["checkpoint_step"] for row in scores if row["system"] == "moe"} == {at}
    assert {name: (folder / name).read_bytes() for name in kept} == kept


@pytest.mark.slow
def test_a_mean_of_checkpoints_is_a_run_with_a_report(
    first: tuple[Path, str], tmp_path: Path
) -> None:
    mean = tmp_path / "mean"
    said = m4("average", first[0], "--steps=2,4", f"--output={mean}").ok()
    assert said.out == f"{mean}: the mean of steps 2, 4; next: m4 eval --model_dir={mean}\n"
    for job in ("eval", "report"):
        said = m4(job, f"--model_dir={mean}").ok()
    assert not (mean / "data").exists()
    assert not (mean / "baselines").exists()
    other = read_jsonl(first[0] / "deltas.jsonl")
    for row, old in zip(read_jsonl(mean / "deltas.jsonl"), other, strict=True):
        assert row["baseline_score"] == old["baseline_score"]
    # Without baselines there is a report all the same.
    for name in ("deltas.jsonl", "report.html"):
        (mean / name).unlink()
    without = m4("report", f"--model_dir={mean}", "--gin.experiment.Experiment.baselines=None")
    assert without.status == 0, without.err
    assert (mean / "report.html").is_file()
    assert not (mean / "deltas.jsonl").exists()


@pytest.mark.slow
def test_what_is_not_as_it_was_written_is_named_and_not_scored(first: tuple[Path, str]) -> None:
    folder, _ = first
    before = contents(folder)
    own = folder / "decodes" / "test.en-es.jsonl"
    (bilingual,) = folder.glob("baselines/es.*/decodes/test.en-es.jsonl")
    (subsets,) = folder.glob("data/*/text/test.gl.subsets.json")
    array = next((folder / "checkpoints" / "4" / "params").rglob("ocdbt.process_0/d/*"))
    cases: list[tuple[Path, bool, str, list[str]]] = [
        (own, False, r"decodes: no translations of en-es; make them with m4 decode", []),
        (own, True, r"test\.en-es\.jsonl: its content is not .* again with m4 decode", []),
        (bilingual, False, r"baselines/es\..* no translations of en-es; .* m4 baselines", []),
        (bilingual, True, r"baselines/es\..*test\.en-es\.jsonl: its content is not", []),
        (subsets, False, r"data/\w+: damaged: text/test\.gl\.subsets\.json: missing", []),
        (subsets, True, r"data/\w+: damaged: text/test\.gl\.subsets\.json: its content", []),
        (array, True, r"checkpoints/4: damaged \(params/ocdbt", ["--step=4"]),
    ]
    for path, there, words, more in cases:
        content = path.read_bytes()
        path.write_bytes(content[:-5] + b"x" + content[-4:]) if there else path.unlink()
        job = "decode" if more else "report"
        said = m4(job, CONFIG, f"--model_dir={folder}", *more)
        assert re.search(words, said.mistake), said.mistake
        path.write_bytes(content)
    assert contents(folder) == before


@pytest.mark.slow
def test_a_converted_run_translates_and_does_not_resume(
    first: tuple[Path, str], tmp_path: Path
) -> None:
    folder, new = first[0], tmp_path / "new"
    more = ["--dtype=bfloat16", f"--output={new}"]
    assert m4("checkpoint", "convert", folder, *more).status == 0
    said = m4("translate", f"--model_dir={new}", "--to=gl", "3 days").ok()
    said = m4("train", f"--model_dir={new}", "--gin.TRAIN_STEPS=6")
    assert "has no optimizer: a run cannot resume" in said.mistake


@pytest.mark.slow
def test_the_atlas_counts_every_token(first: tuple[Path, str]) -> None:
    folder, _ = first
    assert 'id="experts"' in (folder / "report.html").read_text(encoding="utf-8")
    for split, place in (("train", folder), ("test", folder / "decodes")):
        saved = json.loads((place / f"atlas.{split}.json").read_text(encoding="utf-8"))
        assert sorted(saved["directions"]) == sorted(DIRECTIONS)
        assert set(saved["layers"]) == {"encoder_0", "decoder_0"}
        assert list(saved["train_pairs"]) == list(LANGUAGES)
        for counted in saved["layers"].values():
            assert [len(row) for row in counted] == [4] * 6
        said = m4("atlas", f"--model_dir={folder}", f"--split={split}")
        assert (said.status, said.err) == (0, "")
        assert (place / "atlas.png").is_file()
    # In evaluation no choice is without a slot: two a token, also of every source.
    encoder = dict(zip(saved["directions"], saved["layers"]["encoder_0"], strict=True))
    vocabulary = Vocabulary(folder / "vocabulary" / "vocabulary.model")
    for direction, counted in encoder.items():
        rows = read_jsonl(folder / "decodes" / f"test.{direction}.jsonl")
        sources = [tag(row["source"], direction.split("-")[1]) for row in rows]
        pieces = [min(len(ids) + 1, 32) for ids in vocabulary.encode_tagged(sources)]
        assert sum(counted) == 2 * sum(pieces)


@pytest.mark.slow
def test_a_closed_stream_loses_no_translation(
    first: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(streams, "closed", {name})
        said = m4("translate", f"--model_dir={first[0]}", "--to=gl")
        assert said.mistake.startswith(f"m4 translate: standard {name[3:]}put is closed")
    listed = m4("checkpoint", "list", first[0]).mistake
    assert listed.startswith("m4 checkpoint: standard output is closed")


@pytest.mark.slow
def test_translate_has_an_answer_where_the_mesh_cannot_be(first: tuple[Path, str]) -> None:
    def say(*bindings: str) -> tuple[str, str]:
        said = m4("translate", f"--model_dir={first[0]}", "--to=gl", "two days", *bindings).ok()
        return said.out, said.err

    over_eight, cut = say()
    assert "m4 translate" not in cut
    alone, printed = say("--gin.mesh.make_mesh.data=3")
    assert alone == over_eight
    line = printed.removesuffix(cut)
    assert line.count("\n") == 1
    assert line.startswith("m4 translate: on the first device alone: make_mesh.data = 3")


@pytest.mark.slow
def test_translate_answers_each_line_of_a_pipe_before_the_next(first: tuple[Path, str]) -> None:
    words = ["translate", f"--model_dir={first[0]}", "--to=en"]
    wanted = {line: m4(*words, line).ok().out for line in ("dous días", "tres horas")}
    assert all(text.strip() for text in wanted.values())
    command = [sys.executable, "-m", "m4", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ALONE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("dous días", "", "tres horas"):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()  # would wait for ever for a batch
            assert answer == wanted.get(line, "\n")
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait() == 0


# -------- a source and a target vocabulary, and sampled segmentations


@pytest.mark.slow
@pytest.mark.thorough
def test_train_decode_translate(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    arguments = [
        f"--gin_file={TINY}", f"--model_dir={folder}",
        "--gin.corpus.CorpusSpec.target_vocabulary_size=330",
        "--gin.corpus.CorpusSpec.segmentations=2", "--gin.cldr.Cldr.sizes={'es': 90, 'gl': 60}",
        "--gin.corpus.CorpusSpec.mixture='to_english'", "--gin.TRAIN_STEPS=2",
        "--gin.experiment.Training.dev_period=2", "--gin.transformer.Transformer.moe=None",
        "--gin.transformer.Transformer.encoder_layers=1",
        "--gin.transformer.Transformer.decoder_layers=1",
    ]  # fmt: skip
    for job in ("train", "decode"):
        said = m4(job, *arguments).ok()
    made = Cache(folder / "data")
    assert made.separate
    assert made.segmentations == 2
    assert made.directions == ["es-en", "gl-en"]
    for direction in made.directions:
        assert len(read_jsonl(folder / "decodes" / f"test.{direction}.jsonl")) == 12
    about = json.loads((folder / "decodes" / "test.gl-en.json").read_text(encoding="utf-8"))
    assert about["vocabulary"] == made.vocabulary.fingerprint
    said = m4("translate", f"--model_dir={folder}", "--to=en", "dous días").ok()
    assert said.out.count("\n") == 1
    # Another target vocabulary is another model.
    said = m4("decode", *arguments, "--gin.corpus.CorpusSpec.target_vocabulary_size=320")
    assert said.status == 2
    assert "target_vocabulary_size" in said.err
