"""`m4 score`, and settings of the search on the command line and in Python."""

import json
import shutil
from pathlib import Path

import pytest

import m4 as library
from m4.settings import SettingError
from m4.storage.files import read_jsonl
from tests.command_line import m4


@pytest.fixture(scope="module")
def run(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run whose files may change."""
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("score") / "run"))


@pytest.mark.slow
def test_references_of_a_split_are_scored_once(run: Path, tmp_path: Path) -> None:
    said = m4("score", f"--model_dir={run}", "--split=dev").ok()
    files = sorted((run / "decodes").glob("logprob-dev.*.jsonl"))
    assert {"en-gl", "gl-en"} <= {path.name.split(".")[1] for path in files}
    written = {path: path.stat().st_mtime_ns for path in files}
    rows = {path.name.split(".")[1]: read_jsonl(path) for path in files}
    for row in (row for each in rows.values() for row in each):
        assert row["logprob"] < 0 < row["tokens"]
        assert row["score"] == pytest.approx(row["logprob"] / ((5 + row["tokens"]) / 6) ** 0.6)
    tokens = sum(row["tokens"] for row in rows["gl-en"])
    nats = -sum(row["logprob"] for row in rows["gl-en"]) / tokens
    assert f"logprob-dev.gl-en.jsonl: {nats:.3f} nats a token, " in said.out
    # What is there is left as it is; a file that is lost is made again.
    files[0].unlink()
    m4("score", f"--model_dir={run}", "--split=dev").ok()
    assert [path for path in files if path.stat().st_mtime_ns != written[path]] == files[:1]
    # The same pairs as files.
    direction, known = next(iter(rows.items()))
    to = direction.split("-")[1]
    for name in ("source", "reference"):
        text = "".join(f"{row[name]}\r\n" for row in known)  # lines may end as on Windows
        (tmp_path / name).write_bytes(text.encode())
    asked = [f"--model_dir={run}", f"--source={tmp_path / 'source'}", f"--to={to}"]
    said = m4("score", *asked, f"--target={tmp_path / 'reference'}").ok()
    for line, row in zip(said.out.splitlines(), known, strict=True):
        found, given = json.loads(line), {"source": row["source"], "target": row["reference"]}
        assert {**given, "to": to, "tokens": row["tokens"]}.items() <= found.items()
        assert found["logprob"] == pytest.approx(row["logprob"], rel=1e-4)
    # Mistakes are one line.
    (tmp_path / "short").write_text("a\n", encoding="utf-8")
    for more, mistake in (
        (["--target=" + str(tmp_path / "none")], "none: cannot be read"),
        (["--target=" + str(tmp_path / "short")], "short 1: must be as many"),
        ([], "give --source, --target and --to together"),
        (["--target=" + str(tmp_path / "short"), "--split=dev"], "--split: not with --source"),
    ):
        assert mistake in m4("score", *asked, *more).mistake


@pytest.mark.slow
@pytest.mark.thorough
def test_the_search_has_one_set_of_settings_for_all_its_callers(run: Path) -> None:
    def bound(**settings: object) -> list[str]:
        return [f"--gin.experiment.Decoding.{name}={value!r}" for name, value in settings.items()]

    lines, to = ["two days", "", "three hours"], "gl"
    two = bound(beams=3, n_best=2, prefix="o", no_repeat_ngram=2)
    said = m4("translate", f"--model_dir={run}", f"--to={to}", "--json", *two, *lines).ok()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["source"] for row in rows] == lines
    assert [len(row["translations"]) for row in rows] == [2, 1, 2]
    assert rows[0]["scores"] == sorted(rows[0]["scores"], reverse=True)
    front = library.load(run)
    found = front.translate(lines, to, prefix="o", n_best=2, beams=3, no_repeat_ngram=2)
    assert [each.texts for each in found] == [row["translations"] for row in rows]
    assert all(text.startswith("o") for text in found[0].texts + found[2].texts)
    each = front.translate(lines, to, prefix=["o", "", "a"], beams=3)
    assert (each[0][0], each[2][0]) == ("o", "a")
    # Drawn: a separate part, which one binding asks for.
    drawn = ["--gin.experiment.Sampling.top_p=0.9", *bound(n_best=3)]
    said = m4("translate", f"--model_dir={run}", f"--to={to}", "--json", *drawn, lines[0])
    sampling = library.Sampling(top_p=0.9)
    (one,) = front.translate(lines[:1], to, n_best=3, sampling=sampling)
    assert json.loads(said.out)["translations"] == one.texts
    m4("decode", f"--model_dir={run}", "--split=dev", *drawn).ok()
    (path,) = run.glob("decodes/*/dev.en-gl.jsonl")  # a trial's folder is named by its settings
    row = read_jsonl(path)[0]
    assert (row["direction"], row["hypothesis"]) == ("en-gl", row["translations"][0])
    assert len(row["translations"]) == len(row["scores"]) == 3


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ({"n_best": 5}, r"Decoding.n_best = 5: must be at most Decoding.beams = 4"),
        ({"min_length": 128}, r"Decoding.min_length = 128: must be below .*max_target_length"),
        ({"no_repeat_ngram": -1}, r"Decoding.no_repeat_ngram = -1: must be a whole number"),
        ({"mbr": True}, r"Decoding.n_best = 1: must be 2 or more, with Decoding.mbr"),
    ],
)
def test_settings_that_cannot_be(settings: dict, mistake: str) -> None:
    with pytest.raises(SettingError, match=mistake):
        library.Decoding(**settings)
