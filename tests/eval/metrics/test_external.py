"""A scorer of another environment, of which a small script stands in."""

import sys

import numpy as np
import pytest

from m4 import config
from m4.eval.metrics import Metric, bootstrap, counted
from m4.eval.metrics.external import External
from m4.settings import InputError
from tests.command_line import TINY

SCRIPT = str(TINY.with_name("stand_in_scorer.py"))
HYPOTHESES = [f"{n} weeks ago" for n in range(10)]
REFERENCES = [f"{n} days ago" for n in range(10)]
SOURCES = [f"hai {n} semanas" for n in range(10)]


def scorer(tmp_path, *options: str, **settings) -> External:
    log = f"--log={tmp_path / 'log'}"
    command = [sys.executable, SCRIPT, log, *options]
    return External(command, "letters", folder=str(tmp_path / "scores"), **settings)


def score(metric: Metric, count: int = 10):
    return counted(metric, HYPOTHESES[:count], REFERENCES[:count], "en", SOURCES[:count])


def scored(tmp_path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


def test_the_mean_of_its_numbers_with_an_interval(tmp_path):
    found = score(scorer(tmp_path, version="1.2"))
    # "n weeks ago" and "n days ago" have "n ", " " and nothing else in the same place.
    each = [sum(a == b for a, b in zip(h, r, strict=False)) / 10
            for h, r in zip(HYPOTHESES, REFERENCES, strict=True)]  # fmt: skip
    np.testing.assert_array_equal(found.counts, [[one, 1] for one in each])
    assert found.value() == pytest.approx(np.mean(each))
    assert found.signature.startswith("nrefs:1|scorer:letters|version:1.2|sha256:")
    assert bootstrap.score(found).low <= found.value() <= bootstrap.score(found).high
    assert found.select([True, *[False] * 9]).value() == each[0]


def test_a_text_is_scored_once(tmp_path):
    metric = scorer(tmp_path)
    first = score(metric, 4)
    again = score(metric)
    np.testing.assert_array_equal(again.counts[:4], first.counts)
    assert scored(tmp_path) == SOURCES
    assert score(scorer(tmp_path, version="2")).signature != again.signature
    assert scored(tmp_path) == SOURCES * 2


def test_what_a_scorer_had_scored_when_it_died_is_kept(tmp_path):
    with pytest.raises(InputError) as error:
        score(scorer(tmp_path, "--die=7"))
    assert str(error.value).startswith(
        "letters: the scorer ended with status 1 before line 7 (out of memory); 6 of 10 sentences "
        "were scored and are kept in "
    )
    assert "\n" not in str(error.value)
    # The same command goes on where it was: the four that are missing do not reach line 7.
    assert score(scorer(tmp_path, "--die=7")).sentences == 10
    assert scored(tmp_path) == SOURCES
    (kept,) = (tmp_path / "scores").glob("letters--*.jsonl")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-20])  # a line that a killed process has cut
    assert score(scorer(tmp_path, "--die=7")).sentences == 10
    assert scored(tmp_path) == [*SOURCES, SOURCES[-1]]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no/such/program"], "letters: no/such/program: No such file"),
        (["echo", "loading"], "letters: line 1 of the scorer is 'loading': must be a number"),
        (["sh", "-c", "cat; echo 1; echo nan"], "must be a number"),
        (["sh", "-c", "yes 1"], "letters: more lines than sentences: 1"),
        (["sh", "-c", "yes 1 | tr -d '\\n'"], "line 1 of the scorer is '111*': must be a number"),
        (["true"], r"ended with status 0 before line 1 \(no message\); 0 of 10 sentences"),
    ],
)
def test_a_scorer_that_cannot_be_used_is_one_line(tmp_path, command, message):
    with pytest.raises(InputError, match=message) as error:
        score(External(command, "letters", folder=str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_scorer_of_more_lines_than_sentences_keeps_none(tmp_path):
    """A heading that is a number, say, would give each sentence another one's."""
    metric = External(["sh", "-c", "echo 0; sed s/.*/1/"], "letters", folder=str(tmp_path))
    for _ in range(2):
        with pytest.raises(InputError, match="more lines than sentences: 1; none is kept"):
            score(metric)
    (kept,) = tmp_path.iterdir()
    assert not kept.read_bytes()


def test_a_number_is_kept_before_the_next_is_printed(tmp_path, capsys):
    """So that whatever ends the process loses no line; the scorer waits for its own in the file."""
    waits = (
        "n=0; while read -r row; do echo $n; n=$((n + 1)); "
        f"for try in $(seq 500); do cat {tmp_path}/*.jsonl | wc -l | grep -qw $n && continue 2; "
        "sleep 0.02; done; exit 3; done"
    )
    found = score(External(["sh", "-c", waits], "letters", folder=str(tmp_path)))
    np.testing.assert_array_equal(found.counts[:, 0], range(10))
    assert "letters: 10/10 sentences" in capsys.readouterr().out


def test_the_checksum_is_that_of_the_words_and_of_files_content(tmp_path):
    weights = tmp_path / "weights"
    weights.write_text("a")
    signatures = set()
    for content, word in [("a", "x"), ("b", "x"), ("b", "y")]:
        weights.write_text(content)
        metric = External([sys.executable, SCRIPT, str(weights), word], "m", folder=str(tmp_path))
        signatures.add(metric._checksum())
    assert len(signatures) == 3


def test_a_saved_config_runs_no_command(tmp_path):
    ran = tmp_path / "ran"
    saved = tmp_path / "config.gin"
    made = config.load([TINY], ["MODEL_DIR = 'x'"])
    made.experiment()
    saved.write_text(
        f"{made.text()}\n"
        "from m4.eval.metrics import external\n"
        "experiment.Decoding.metrics = (@external.External(),)\n"
        f"external.External.command = ['touch', {str(ran)!r}]\n"
        "external.External.name = 'comet'\n"
    )

    def metric(given=()):
        return config.load([saved], given, allowed_modules=()).experiment().decoding.metrics[0]

    said = r"a run folder is data.*--gin.external.External.command="
    with pytest.raises(InputError, match=said):
        score(metric())
    assert not ran.exists()
    own = f"external.External.command = ['sh', '-c', 'touch {ran}; yes 1 | head -n 10']"
    kept = f"external.External.folder = {str(tmp_path)!r}"
    assert score(metric([own, kept])).value() == 1  # what the user types is the user's own
    assert ran.exists()
