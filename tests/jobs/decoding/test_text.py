"""`m4 decode --input`: every line has its translation, and every mistake is one line."""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from etils import epath

import m4 as package
from m4 import config
from m4.data import tasks
from m4.data.sentences import sentences
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.eval.decoding import decode as decoding
from m4.eval.decoding.decode import Translations
from m4.eval.decoding.hypotheses import t5x_line
from m4.eval.text import Output, Text
from m4.jobs.decoding import text as job
from m4.jobs.decoding.testsets import loaded
from m4.jobs.decoding.text import missing_lines, windows
from m4.storage.files import read_jsonl
from tests.command_line import m4

LONG = "Yesterday was Monday. Tomorrow there will be nothing of this. And now?"
LINES = ["3 weeks ago", "", "last e\u0301te\u0301", LONG, "  ", "Monday\u200e", "a\tb"]


def decode(run: Path, *arguments: object):
    return m4("decode", f"--model_dir={run}", *arguments)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "in.txt"
    path.write_bytes("\r\n".join(LINES).encode())
    return path


@pytest.fixture(scope="module")
def expected(trained: Path, text: Path) -> list[str]:
    """Returns the translations of LINES into gl."""
    output = text.parent / "expected.txt"
    said = decode(trained, f"--input={text}", "--to=gl", f"--output={output}").ok()
    assert "7 lines, 2 blank, 1 too long for max_source_length = 32" in said.out
    assert "in.txt line 4: " in said.err
    assert re.search(r"sentences/s, .* of the batches are real tokens", said.out)
    return output.read_text(encoding="utf-8").split("\n")


def test_every_line_has_the_translation_of_m4_translate(trained: Path, expected: list[str]) -> None:
    *lines, rest = expected
    assert rest == ""
    run = package.load(trained)
    assert lines == run.translate(LINES, "gl")
    short = [part for part in sentences(LONG) if len(part) < 30]
    assert short
    for translation in run.translate(short, "gl"):
        assert translation.strip() in lines[LINES.index(LONG)]


def test_tsv_is_pairs_for_training_with_what_made_them(
    trained: Path, text: Path, expected: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "gl~bt.train.tsv"
    decode(trained, f"--input={text}", "--to=gl", f"--output={output}", "--format=tsv").ok()
    pairs = [line.split("\t") for line in output.read_text("utf-8").splitlines()]
    assert [english for english, _ in pairs] == [" ".join(line.split()) for line in LINES]
    assert [other for _, other in pairs] == [" ".join(line.split()) for line in expected[:-1]]
    about = json.loads((tmp_path / "gl~bt.train.tsv.json").read_text("utf-8"))
    assert {"run": str(trained), "from": "en", "to": "gl", "beams": 2}.items() <= about.items()
    assert about["step"] == package.load(trained).metrics[-1]["step"]
    assert "--format=tsv: give --input" in decode(trained, "--format=tsv").mistake


def test_translate_takes_the_run_first_and_flags_of_the_search(trained: Path) -> None:
    run, line = package.load(trained), "3 weeks ago"
    said = m4("translate", trained, "--to=gl", "--n_best=2", line).ok()
    (found,) = run.translate([line], "gl", n_best=2)
    assert said.out.splitlines() == found.texts
    said = m4("translate", trained, line, "--to=gl", "--beams=1")
    assert said.out.splitlines() == run.translate([line], "gl", beams=1)
    mistake = m4("translate", "--to=gl", line).mistake
    assert f"{line!r}: no such folder; the first argument is the run, as `m4 translate" in mistake
    mistake = m4("translate", trained, line, "--to=gl", "--beams=0").mistake
    assert "experiment.Decoding.beams = 0: must be a whole number from 1 to 1,024" in mistake


def test_a_word_that_looks_like_a_tag_is_text(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line of `m4 decode --input` and in a sentence given to `m4 translate`."""
    encoded, searched = decoding.encoded_sources, []

    def noted(vocabulary: Vocabulary, *given: Any) -> list[list[int]]:
        ids = encoded(vocabulary, *given)
        tags = {vocabulary.tag_id(code): code for code in vocabulary.languages}
        searched.extend([tags[i] for i in row if i in tags] for row in ids)
        return ids

    monkeypatch.setattr(decoding, "encoded_sources", noted)
    texts = ["<2pt> Monday", "<2gl>", "red <2en> bird", "\uff1c2es\uff1e x"]
    (tmp_path / "in.txt").write_text("\n".join(texts), encoding="utf-8")
    decode(trained, f"--input={tmp_path / 'in.txt'}", "--to=gl", f"--output={tmp_path}/out").ok()
    m4("translate", f"--model_dir={trained}", "--to=gl", texts[0]).ok()
    assert searched == [["gl"]] * (len(texts) + 1)


def test_folders_packed_files_and_several_languages(
    trained: Path, text: Path, expected: list[str], tmp_path: Path
) -> None:
    folder, output = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "a.txt.gz").write_bytes(gzip.compress(text.read_bytes()))
    (folder / "b.en").write_text("\n")
    (folder / ".hidden").write_text("x")
    decode(trained, f"--input={folder}", "--to=gl,es", f"--output={output}").ok()
    assert {str(path.relative_to(output)) for path in output.rglob("*.*")} == {
        "b.en.es.txt", "b.en.gl.txt", "a.es.txt", "a.gl.txt",
    }  # fmt: skip
    assert (output / "a.gl.txt").read_text().split("\n") == expected
    assert len((output / "a.es.txt").read_text().splitlines()) == len(LINES)
    assert (output / "b.en.es.txt").read_text() == "\n"
    # The same command makes what is missing, and nothing else.
    (output / "b.en.gl.txt").unlink()
    before = (output / "a.gl.txt").stat().st_mtime_ns
    said = decode(trained, f"--input={folder}", "--to=gl,es", f"--output={output}")
    assert said.out.count("already there (--overwrite replaces it)") == 3
    assert (output / "b.en.gl.txt").exists()
    assert (output / "a.gl.txt").stat().st_mtime_ns == before


def test_standard_input_to_standard_output(
    trained: Path, text: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    said = decode(trained, "--input=-", "--to=gl", "--output=-").ok()
    assert said.out.split("\n") == expected
    assert "sentences/s" in said.err


def test_lines_of_json_have_scores(
    trained: Path, text: Path, expected: list[str], tmp_path: Path
) -> None:
    decode(trained, f"--input={text}", "--to=gl", "--json", f"--output={tmp_path}/").ok()
    rows = [json.loads(line) for line in (tmp_path / "in.gl.jsonl").read_text().splitlines()]
    assert [row["source"] for row in rows] == LINES
    assert [row["translations"] for row in rows] == [[line] for line in expected[:-1]]
    assert {row["to"] for row in rows} == {"gl"}
    assert all(len(row["scores"]) == 1 for row in rows)
    assert rows[0]["scores"][0] < 0 == rows[1]["scores"][0]


def output_of(folder: Path, content: bytes, to: str = "gl", lines: int = 0) -> Output:
    (folder / "a.txt").write_bytes(content)
    text = Text(epath.Path(folder / "a.txt"), "a.txt")
    return Output(text, to, folder / f"a.{to}.txt", lines, content.count(b"\n"))


def test_each_output_gets_what_it_lacks_and_memory_does_not_grow(tmp_path: Path) -> None:
    outputs = [output_of(tmp_path, b"a\nb\nc\n\xff\n", to, n) for to, n in (("gl", 2), ("es", 1))]
    coming = windows(missing_lines(outputs, str.upper), 2)
    found = [(one.output.to, one.number, one.given, one.source) for one in next(coming)]
    assert found == [("es", 2, "b", "B"), ("gl", 3, "c", "C")]
    # A line that cannot be read is met in its window.
    with pytest.raises(ValueError, match=r"a\.txt line 4: not UTF-8"):
        next(coming)


def test_long_lines_make_small_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_WINDOW_CHARACTERS", 10)
    lines = missing_lines([output_of(tmp_path, b"abcdef\n" * 5)], str)
    assert [len(window) for window in windows(lines, 100)] == [2, 2, 1]


def test_input_that_changes_meanwhile_is_an_error(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n")

    def changed(*given: Any) -> Any:
        (tmp_path / "a.txt").write_text("1\n")
        return loaded(*given)

    monkeypatch.setattr(job, "loaded", changed)
    said = decode(trained, f"--input={tmp_path}/a.txt", "--to=gl", f"--output={tmp_path}/b.txt")
    assert "b.txt: 1 lines of 2: the input has changed" in said.mistake


WRONG = [
    ("--input=TEXT --output=OUT", "--to: missing"),
    ("--input=TEXT --to=galician --output=OUT", "Did you mean gl (Galician)?"),
    ("--input=TEXT --to=gl --from=xx --output=OUT", "--from=xx: the model does not translate"),
    ("--input TEXT TEXT --to=gl --output=OUT", "would both be in.gl.txt"),
    ("--input=LATIN --to=gl --output=OUT", "latin.txt line 2: not UTF-8"),
    ("--input=BROKEN --to=gl --output=OUT", "broken.gz: damaged, it cannot be unpacked"),
    ("--input=DEEP --to=gl --output=OUT", "deep: no file; of a folder its own files are read"),
    ("--input=TEXT --to=gl --output=/dev/null", "--output=/dev/null: not a file but a pipe"),
    ("--input=PIPE --to=gl --output=OUT", "can be read only once; give a file, or - for standard"),
]


@pytest.mark.parametrize(("arguments", "mistake"), WRONG, ids=[each for each, _ in WRONG])
def test_a_mistake_is_one_line(
    trained: Path, text: Path, tmp_path: Path, arguments: str, mistake: str
) -> None:
    (tmp_path / "latin.txt").write_bytes("one\ncaf\u00e9\n".encode("latin-1"))
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"one\n" * 99)[:-9])
    (tmp_path / "in" / "deep").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    places = {"TEXT": text, "OUT": tmp_path / "out", "LATIN": tmp_path / "latin.txt",
              "BROKEN": tmp_path / "broken.gz", "DEEP": tmp_path / "in",
              "PIPE": tmp_path / "pipe"}  # fmt: skip
    words = re.sub(r"\b[A-Z]{3,}\b", lambda name: str(places[name[0]]), arguments).split()
    assert mistake in decode(trained, *words).mistake
    assert not (tmp_path / "out").exists()


def test_a_direction_that_was_not_trained_is_named(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n")
    files = f"--input={tmp_path}/a.txt", f"--output={tmp_path}/b.txt"
    said = decode(trained, *files, "--from=es", "--to=gl").ok()
    assert "es-gl: the model was not trained on this direction" in said.err


def test_lines_of_a_model_of_the_same_step_are_not_continued(
    trained: Path, first: Path, tmp_path: Path
) -> None:
    """Two runs on one corpus: step and vocabulary are the same."""
    notes = [
        loaded(config.load([run / "config.gin"], model_dir=str(run)).experiment(), 2)[1]
        for run in (trained, first, trained)
    ]
    different = {name for name in notes[0] if notes[0][name] != notes[1][name]}
    assert different == {"checkpoint"}
    assert notes[0] == notes[2]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_killed_job_resumes_to_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    text = tmp_path / "in.txt"
    text.write_text("".join(f"{i} weeks and {i * i} days ago\n" for i in range(400)))
    undisturbed, output = tmp_path / "undisturbed.txt", tmp_path / "out.txt"
    arguments = ["--input", str(text), "--to=gl", "--gin.experiment.Decoding.batch_rows=2"]
    decode(trained, *arguments, f"--output={undisturbed}").ok()
    command = [sys.executable, "-m", "m4", "decode", f"--model_dir={trained}", *arguments]
    command.append(f"--output={output}")
    note, seen, kills = tmp_path / "out.txt.partial", b"", 0
    while not output.exists():
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                if (now := note.read_bytes()) != seen and kills < 3:
                    seen, kills = now, kills + 1
                    time.sleep(0.05 * kills)
                    os.kill(process.pid, signal.SIGKILL)
                    break
            time.sleep(0.002)
        process.wait()
    assert kills == 3
    assert output.read_bytes() == undisturbed.read_bytes()
    assert not note.exists()


# -------- --format=t5x: lines as T5X's inference writes them


def test_the_best_of_several_comes_last_as_in_t5x() -> None:
    one = t5x_line("3 weeks ago", Translations(["hai"], [-1.0]), "gl")
    assert json.loads(one) == {
        "inputs": {"inputs_pretokenized": "<2gl> 3 weeks ago"},
        "prediction": "hai",
    }
    several = t5x_line("a", Translations(["best", "second"], [-1.0, -2.0]), "gl")
    assert json.loads(several) == {
        "inputs": {"inputs_pretokenized": "<2gl> a"},
        "prediction": ["second", "best"],
        "aux": {"scores": [-2.0, -1.0]},
    }


@pytest.mark.slow
def test_test_sets_become_files_of_tasks(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    best = "--gin.experiment.Decoding.n_best=2"
    m4("decode", f"--model_dir={run}", "--format=t5x", "--split=dev", best).ok()
    decodes = run / "decodes" / "n_best=2"  # a trial's are its own
    folder = decodes / "t5x"
    name = f"{tasks.task_name('en-gl')}_dev-predict_with_aux.jsonl-00000-of-00001"
    assert (folder / f"{name}.COMPLETED").read_bytes() == b""
    rows = read_jsonl(folder / name)
    kept = read_jsonl(decodes / "dev.en-gl.jsonl")
    assert len(rows) == len(kept) > 0
    for row, own in zip(rows, kept, strict=True):
        assert row["inputs"] == {
            "inputs_pretokenized": f"<2gl> {own['source']}",
            "targets_pretokenized": own["reference"],
        }
        assert row["prediction"][-1] == own["hypothesis"]


def test_text_becomes_lines_and_formats_are_not_mixed(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("3 weeks ago\nMonday\n")
    given = (
        "decode", f"--model_dir={trained}", f"--input={tmp_path / 'in.txt'}", "--to=gl",
        f"--output={tmp_path / 'out.jsonl'}", "--format=t5x",
    )  # fmt: skip
    assert "not with --json" in m4(*given, "--json").mistake
    assert not (tmp_path / "out.jsonl").exists()
    m4(*given).ok()
    rows = read_jsonl(tmp_path / "out.jsonl")
    sources = [row["inputs"]["inputs_pretokenized"] for row in rows]
    assert sources == ["<2gl> 3 weeks ago", "<2gl> Monday"]
    assert all(isinstance(row["prediction"], str) for row in rows)
