"""`m4 data preview`, `batch` and `vocabulary`: they train nothing, and touch no accelerator.

The preview's numbers are a recount of the stream's batches, and arithmetic by hand; those of a
vocabulary a plain count of every sentence's pieces.
"""

import collections
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.directions import pair_of, split_direction
from m4.data.inspection import preview
from m4.data.inspection.preview import DrawnPair
from m4.data.samplers.schedule import Schedule
from m4.data.samplers.temperature import temperature
from m4.data.samplers.uniform import uniform
from m4.data.sources import Pair
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from m4.jobs.data.vocabulary import measure
from tests.command_line import TINY, experiment_of, m4
from tests.data.arrays import pairs_of
from tests.data.corpus import Made


def test_tokens_by_hand(made_cache: Cache) -> None:
    seen = {"en-gl": 450, "gl-en": 300, "en-pt": 200, "pt-en": 271}
    drawn = preview.drawn_of(made_cache, seen)
    tokens = {c: sum(seen[d] * mixture.pair_tokens(made_cache, d) for d in (f"en-{c}", f"{c}-en"))
              for c in ("gl", "pt")}  # fmt: skip
    assert drawn["gl"].tokens == round(tokens["gl"])
    assert drawn["gl"].token_share == pytest.approx(tokens["gl"] / sum(tokens.values()))
    assert drawn["sr_Latn"] == DrawnPair(0, 0.0, 0, 0.0, 0.0, 0, 0)


@pytest.mark.parametrize(
    "sampler", [temperature, Schedule([(0, uniform, ["gl"]), (9, uniform, None)])]
)
def test_a_recount_of_the_batches(made_cache: Cache, sampler: mixture.Sampler) -> None:
    """Every pair by its ids: how many come more than once, and how often the most frequent."""
    steps = 60
    single = functools.partial(Stream, layout="single")  # leaves nothing out
    stream = mixture.make_stream(made_cache, sampler, stream=single, batch_rows=24, seed=5)
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for step in range(steps):
        for direction, *ids in pairs_of(stream.batch(step)):
            counts[stream.directions[direction]][tuple(ids)] += 1
    drawn = preview.drawn_of(made_cache, stream.examples_seen(steps))
    total = sum(sum(count.values()) for count in counts.values())
    assert total == steps * 24
    for code, one in drawn.items():
        mine = [counts[d] for d in (f"en-{code}", f"{code}-en") if d in counts]
        assert one.pairs == sum(sum(count.values()) for count in mine)
        assert one.pair_share == pytest.approx(one.pairs / total)
        most = max(mine, key=lambda count: sum(count.values()))
        assert one.epochs == pytest.approx(sum(most.values()) / made_cache.size(code, "train"))
        assert one.repeated == sum(number > 1 for number in most.values())
        assert one.times == max(most.values())


def test_warnings() -> None:
    many = DrawnPair(900, 0.9, 9000, 0.8, 0.9, 0, 1)
    few = DrawnPair(100, 0.1, 2250, 0.2, 20.0, 5, 20)
    drawn = {"es": many, "gl": few}
    assert preview.repeated_more_than(drawn, 16) == {"gl": 20.0}
    assert preview.repeated_more_than(drawn, 20) == {}  # more than, not as often as
    (repeated,) = preview.warnings(drawn, 16)
    assert repeated.startswith(
        "1 of 2 pairs of languages would be seen more than 16 times (gl 20.0): lower "
    )
    assert preview.warnings(drawn, 20) == []
    never = DrawnPair(0, 0.0, 0, 0.0, 0.0, 0, 0)
    assert preview.warnings({"es": many, "gl": never}, 16) == ["never drawn: gl"]


def test_the_matrix_of_directions() -> None:
    """Sources en, fr and wo; targets fr and wo."""
    made = preview.matrix({"en-fr": 3000, "fr-wo": 20, "wo-fr": 7})
    columns = {str(one.header): [*one.cells] for one in made.columns}
    assert columns == {
        "pairs drawn": ["en", "fr", "wo"],
        "→ fr": ["3k", "", "7"],
        "→ wo": ["", "20", ""],
    }


class _Rare(Made):
    """Source whose Portuguese sentences begin with rare characters; not all get a piece."""

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        for number, one in enumerate(super().pairs(pair, split)):
            rare = f"{chr(0x4E00 + number)} " if pair == "en-pt" else ""
            yield Pair(one.first, rare + one.second)


def test_rows_are_a_plain_count(tmp_path: Path) -> None:
    """All sentences count, each once, in the best of two segmentations."""
    spec = CorpusSpec(_Rare({"gl": 60, "pt": 90}), vocabulary_size=400, segmentations=2)
    cache = spec.build(tmp_path)
    texts: dict[str, set[str]] = {"en": set(), "gl": set(), "pt": set()}
    for name in cache.language_pairs():
        for pair in cache.pairs(name, "train"):
            for code, text in zip(split_direction(name), (pair.first, pair.second), strict=True):
                texts[code].add(text)
    rows = {row.language: row for row in measure(cache, 1000)}
    assert list(rows) == list(texts)
    for code, sentences in texts.items():
        encoder = cache.source_vocabulary
        names = [encoder.pieces[i] for text in sentences for i in encoder.encode([text])[0]]
        words = [word for text in sentences for word in text.split(" ")]
        counts = (len(sentences), len(words), len("".join(words)))
        spelled = [name for name in names if re.fullmatch("<0x..>", name)]
        assert rows[code][1:] == pytest.approx(
            ("shared", counts[0], *(len(names) / n for n in counts), len(spelled) / len(names))
        )
    assert rows["pt"].byte_share > rows["gl"].byte_share == 0
    assert [row.sentences for row in measure(cache, 7)] == [7, 7, 7]


def test_separate_vocabularies_are_asked_for_their_own_languages(tmp_path: Path) -> None:
    sizes: Any = {"vocabulary_size": 400, "target_vocabulary_size": 350}
    cache = CorpusSpec(Made({"gl": 60, "pt": 30}), None, "to_english", **sizes).build(tmp_path)
    rows = [(row.vocabulary, row.language) for row in measure(cache, 9)]
    assert rows == [("source", "gl"), ("source", "pt"), ("target", "en")]


def test_the_command_vocabulary(tmp_path: Path) -> None:
    arguments = ("data", "vocabulary", f"--gin_file={TINY}", f"--model_dir={tmp_path}/model")
    assert m4(*arguments, "--sentences=0").mistake.endswith(": --sentences=0: must be at least 1")
    said = m4(*arguments, "--sentences=20")
    assert said.status == 0, said.err
    assert re.search(r"gl Galician +│ shared +│ +20 │", said.out)


@pytest.mark.slow
def test_no_accelerator_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from jax._src import xla_bridge\n"
        "from m4.__main__ import main\n"
        "assert main(['data', 'prepare', *sys.argv[3:5]]) == 0\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert not {'tensorflow', 'seqio'} & set(sys.modules)\n"
    )
    folder = tmp_path / "model"
    command = [sys.executable, "-c", code, "data", "preview", f"--gin_file={TINY}",
               f"--model_dir={folder}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "es Spanish" in done.stdout
    made = json.loads((folder / "data_preview.json").read_text("utf-8"))
    assert made["sampler"] == "temperature"
    # Four steps of 8 rows are far less than one epoch.
    assert made["repeated_more"] == {}


@pytest.fixture(scope="module")
def previewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("previewed") / "model"
    m4("data", "preview", f"--gin_file={TINY}", f"--model_dir={folder}").ok()
    return folder


def test_the_pairs_of_a_step_are_those_of_its_batch(previewed: Path) -> None:
    folder = (f"--gin_file={TINY}", f"--model_dir={previewed}")
    said = m4("data", "batch", *folder, "--step=3").ok()
    header, *lines = (line.split("\t") for line in said.out.splitlines())
    pairs = [dict(zip(header, line, strict=True)) for line in lines]
    experiment = experiment_of(TINY, f"MODEL_DIR = {str(previewed)!r}")
    cache = Cache(previewed / "data")
    made = build(experiment, cache).stream.batch(2)
    for side, name in (("source", "encoder_input_tokens"), ("target", "decoder_target_tokens")):
        found = [sum(int(one[f"{side}_pieces"]) for one in pairs if int(one["row"]) == row)
                 for row in range(experiment.training.batch_size)]  # fmt: skip
        assert found == (made[name] > 0).sum(axis=1).tolist()
    for one in pairs:
        code = pair_of(one["direction"])
        pair = [*cache.pairs(code, "train")][int(one["line"]) - 1]
        assert (pair.first, pair.second) == (one["first"], one["second"])
    mistake = m4("data", "batch", *folder, "--step=0").mistake
    assert "--step=0: must be from 1 to 4 (TRAIN_STEPS)" in mistake


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--most_epochs=0"], "--most_epochs=0.0: must be above 0"),
        (["--gin.experiment.Data.sample_by='words'"], "Data.sample_by = 'words': must be"),
    ],
)  # fmt: skip
def test_mistakes(previewed: Path, arguments: list[str], said: str) -> None:
    mistake = m4("data", "preview", f"--model_dir={previewed}", *arguments).mistake
    assert mistake.startswith("m4 data preview: ")
    assert said in mistake
