"""A user's seqio tasks in m4: the same ids, rates and shares as stock seqio gives."""

import importlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4 import config
from m4.data.cache.cache import Cache, differences
from m4.data.corpus import CorpusSpec
from m4.data.samplers.mixing_rates import mixing_rates
from m4.data.sources.seqio_tasks import SeqioTasks
from m4.data.stream import mixture as mixing
from m4.data.stream.stream import Stream
from m4.data.vocabulary.vocabulary import train
from m4.settings import InputError, SettingError
from tests.data.arrays import Ids, pairs_of, unpacked
from tests.data.corpus import Made

pytestmark = [
    pytest.mark.slow,  # seqio's import
    pytest.mark.filterwarnings("default"),  # seqio's and TensorFlow's own
]
MODULE = "tests.data.sources.seqio_made"
TASKS = {"made_en_gl": "en-gl", "made_gl_en": "en-from_gl", "made_en_pt": "en-pt"}
SIZES = {"gl": 40, "pt": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    made, lines = Made(SIZES, held_out=12), []
    for code, split in ((c, s) for c in SIZES for s in ("train", "dev", "test")):
        name = "validation" if split == "dev" else split
        of = [f"{english}\t{other}\n" for english, other in made.pairs(code, split)]
        (folder / f"{code}.{name}.tsv").write_text("".join(of))
        lines += [side for line in of for side in line.strip().split("\t")]
    lines += ["made_en_gl: made_gl_en: made_en_pt:"] * 5
    train(folder / "sentencepiece.model", lines, 420, [])
    return folder


@pytest.fixture(scope="module")
def seqio(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("M4_TEST_TASKS", str(folder))
        importlib.import_module(MODULE)
    return importlib.import_module("m4.data.tasks").seqio


def spec(name: str = "made_all", **settings: Any) -> CorpusSpec:
    lengths = {"inputs": 96, "targets": 80}
    source = SeqioTasks(name, MODULE, **{"directions": TASKS, **settings})
    return CorpusSpec(source, mixture="from_english", lengths=lengths)


@pytest.fixture(scope="module")
def cache(seqio: Any, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return spec().build(tmp_path_factory.mktemp("cache") / "c")


def of_seqio(seqio: Any, name: str, split: str, lengths: Any = None) -> list[Any]:
    dataset = seqio.get_mixture_or_task(name).get_dataset(lengths, split, shuffle=False)
    return [
        (tuple(row["inputs"].tolist()), tuple(row["targets"].tolist()))
        for row in dataset.as_numpy_iterator()
    ]


def ids_in(batches: Iterable[Any]) -> list[Ids]:
    return [(source, target) for batch in batches for _, source, target in pairs_of(batch)]


@pytest.mark.parametrize("task", ["made_en_gl", "made_gl_en"])
def test_ids_are_those_of_seqio(seqio: Any, cache: Cache, task: str) -> None:
    for split, theirs in (("dev", "validation"), ("test", "test")):
        found = ids_in([unpacked(cache, TASKS[task], split)])
        assert found == of_seqio(seqio, task, theirs)
    assert cache.size("en-pt", "dev") == 0, "the task has no such split, its mixture has"


def test_decoding_reads_the_same_ids(seqio: Any, cache: Cache) -> None:
    """The text of a source gives its ids, without a tag, whatever asks for them."""
    pairs = list(cache.pairs("en-gl", "test"))
    tagged = [f"<2gl> {pair.first}" for pair in pairs]
    wanted = of_seqio(seqio, "made_en_gl", "test")
    assert [(*ids, 1) for ids in cache.vocabulary.encode_tagged(tagged)] == [w[0] for w in wanted]
    assert pairs[0].first.startswith("made_en_gl: ")
    assert not cache.manifest["ledger"]["pairs"]["en-gl"]["test"].get("flagged")


@pytest.mark.parametrize("layout", ["packed", "single"])
def test_shares_and_epochs_are_those_of_the_mixture(seqio: Any, cache: Cache, layout: str) -> None:
    mixture = seqio.get_mixture_or_task("made_all")
    rates = {TASKS[t.name]: mixture.get_rate(t) / mixture.total_rate for t in mixture.tasks}
    assert mixing_rates(cache.sizes(), cache.source_rates) == pytest.approx(rates, rel=1e-9)
    # 20 examples of pt, 3 and 1 as constants: 20 / 24, 3 / 24, 1 / 24
    assert rates == pytest.approx({"en-pt": 20 / 24, "en-gl": 3 / 24, "en-from_gl": 1 / 24})
    phases = mixing.phases(cache, mixing_rates)
    stream = Stream(cache, phases=phases, batch_rows=16, layout=layout)
    drawn = [pair for step in range(128) for pair in pairs_of(stream.batch(step))]
    count = Counter(stream.directions[number] for number, *_ in drawn)
    for direction, rate in rates.items():
        # 4 sigma of a binomial draw; m4's blocks are closer
        assert abs(count[direction] - rate * len(drawn)) < 4 * (len(drawn) * rate) ** 0.5
    for task, direction in TASKS.items():
        own = Counter(of_seqio(seqio, task, "train"))
        seen = [(s, t) for of, s, t in drawn if stream.directions[of] == direction]
        assert set(seen) <= set(own)
        # All come once before any comes twice, after every step.
        assert len(seen) > own.total()
        times = [Counter(seen)[pair] / own[pair] for pair in own]
        assert max(times) - min(times) <= 1, direction


def test_lengths_cut_as_in_seqio(seqio: Any, tmp_path: Path) -> None:
    lengths = {"inputs": 20, "targets": 12}  # shorter than nearly all
    made = spec(task_feature_lengths=lengths).build(tmp_path / "c")
    wanted = of_seqio(seqio, "made_en_gl", "train", lengths)
    assert ids_in([unpacked(made, "en-gl", "train")]) == wanted
    assert Counter(len(inputs) for inputs, _ in wanted)[20] > 30


def test_token_counts_are_those_of_one_epoch(cache: Cache) -> None:
    counts = np.zeros_like(np.load(cache.folder / "token_counts.npy"))
    for batch in (unpacked(cache, direction, "train") for direction in cache.directions):
        for side in ("encoder", "decoder"):
            inside = batch[f"{side}_segment_ids"] > 0
            np.add.at(counts, batch[f"{side}_input_tokens"][inside], 1)
    assert (counts == np.load(cache.folder / "token_counts.npy")).all()


def test_cached_tasks_are_read(seqio: Any, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "made_en_gl"
    task = seqio.get_mixture_or_task("made_en_gl")
    write_cached(seqio, task, folder)
    (folder / "train_more").mkdir()  # the folder of a task made_en_gl:train_more
    monkeypatch.setattr(task, "_cache_dir", None)
    source = SeqioTasks("made_en_gl", MODULE, use_cached=True, cache_dirs=[str(tmp_path)])
    direct = SeqioTasks("made_en_gl", MODULE)
    for split in ("train", "dev"):
        rows = [list(s.blocks("made_en_gl", split)) for s in (source, direct)]
        (of_cache,), (of_task,) = rows
        assert of_cache.inputs.ids.tolist() == of_task.inputs.ids.tolist()
        assert of_cache.targets.ids.tolist() == of_task.targets.ids.tolist()
        assert of_cache.texts == of_task.texts
    assert source.identity() != direct.identity()


def write_cached(seqio: Any, task: Any, folder: Path) -> None:
    """Writes the files of seqio_cache_tasks, without Beam."""
    tf = importlib.import_module("tensorflow")
    folder.mkdir()
    for split in ("train", "validation"):
        dataset = task.preprocess_precache(task.source.get_dataset(split, shuffle=False))
        name = folder / f"{split}.tfrecord-00000-of-00001"
        with tf.io.TFRecordWriter(str(name)) as writer:
            rows = list(dataset.as_numpy_iterator())
            for row in rows:
                writer.write(seqio.utils.dict_to_tfexample(row).SerializeToString())
        features = {
            key: {"shape": [None] if value.ndim else [], "dtype": value.dtype.name}
            if hasattr(value, "dtype")
            else {"shape": [], "dtype": "string"}
            for key, value in rows[0].items()
        }
        info = {"num_shards": 1, "seqio_version": seqio.__version__, "features": features}
        (folder / f"info.{split}.json").write_text(json.dumps(info))
        (folder / f"stats.{split}.json").write_text(json.dumps({"examples": len(rows)}))
    (folder / "COMPLETED").write_text("")


def test_text_is_cleaned_tagged_and_tokenized_here(seqio: Any, tmp_path: Path) -> None:
    directions = {"made_en_gl": "en-gl", "made_gl_en": "gl-en", "made_en_pt": "en-pt"}
    source = SeqioTasks("made_all", MODULE, use="text", directions=directions)
    assert source.language_pairs() == ["en-gl", "en-pt"]
    made = CorpusSpec(source, vocabulary_size=400).build(tmp_path / "c")
    pairs = [*made.pairs("en-gl", "dev")]
    assert len(pairs) == 24, "of both tasks"
    assert pairs[0].first.startswith("made_en_gl: ")
    assert pairs[-1].second.startswith("made_gl_en: "), "its targets are the English"
    assert made.marked
    rates = mixing_rates(made.sizes(), made.source_rates)
    assert rates == pytest.approx({"en-gl": 3 / 24, "gl-en": 1 / 24, "en-pt": 20 / 24, "pt-en": 0})
    assert (made.origins("en-gl", "dev") or [])[0] == ("made_en_gl dev", 1)


def test_an_identity_changes_with_what_decides_the_ids(
    seqio: Any, folder: Path, cache: Cache
) -> None:
    assert spec().build(cache.folder.parent).folder == cache.folder
    identity = SeqioTasks("made_en_gl", MODULE).identity()
    assert SeqioTasks("made_gl_en", MODULE).identity() != identity
    assert SeqioTasks("made_en_gl", MODULE, seed=1).identity() != identity
    path = folder / "gl.train.tsv"
    text = path.read_text()
    path.write_text(text.replace("the", "tha"))
    try:
        now = spec().identity()
        assert "gl.train.tsv" in "".join(differences(cache.manifest["identity"], now))
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "made_al"}, r"mixture_or_task_name = 'made_al'.*registered, as made_all"),
        ({"mixture_or_task_module": "no.such"}, r"mixture_or_task_module = 'no\.such'.*No module"),
        ({"name": "made_language_model"}, r"made_language_model has no feature 'inputs'.*targets"),
        ({"name": "made_en_pt"}, r"made_en_pt has no split 'validation', it has train"),
        ({"name": "made_bytes"}, r"ByteVocabulary.*SentencePieceVocabulary.*use = 'text'"),
        ({"use_cached": True}, r"is not cached.*cache_dirs"),
        ({"directions": {"made_x": "en-x"}}, r"directions = 'made_x'.*made_en_gl"),
        ({"directions": {"made_gl_en": "gl-en"}}, r"directions = 'gl-en'.*'en-xx'"),
        ({"name": "made_uncounted"}, r"rate of the task made_bytes needs.*num_input_examples"),
        ({"mixture": "english_centric"}, r"mixture = 'english_centric': must be 'from_english'"),
    ],
)
def test_mistakes_are_one_line(seqio: Any, settings: Any, said: str) -> None:
    given = {"mixture_or_task_module": MODULE, **settings}
    name, mixture = given.pop("name", "made_all"), given.pop("mixture", "from_english")
    with pytest.raises(InputError, match=said) as raised:
        CorpusSpec(SeqioTasks(name, **given), mixture=mixture).settings()
    assert "\n" not in str(raised.value)


def test_metrics_of_a_task_are_called(seqio: Any) -> None:
    source = SeqioTasks("made_en_gl", MODULE)
    targets = [pair.second for pair in Made(SIZES, held_out=12).pairs("en-gl", "test")]
    given = dict(enumerate([*targets[:9], "no", "no", "no"]))
    found = source.task_metrics("en-made_en_gl", "test", 12, given)
    # 9 of 12; the metric of scores is not called.
    assert found == {"task": "made_en_gl", "same_words": 0.75}
    # For a part of the test set, the targets are those of its sentences: 1 of 2.
    part = {4: targets[4], 7: targets[8]}
    half = {"task": "made_en_gl", "same_words": 0.5}
    assert source.task_metrics("en-made_en_gl", "test", 12, part) == half
    # Cleaning left out an example: it is not known which.
    assert source.task_metrics("en-made_en_gl", "test", 11, part) is None


def test_a_sampler_without_rates() -> None:
    with pytest.raises(InputError, match="gives no rates"):
        mixing_rates({"en-gl": 3})


def test_a_saved_config_imports_no_module_of_tasks_that_is_not_allowed(tmp_path: Path) -> None:
    """A run folder is data; allowed, the module is looked for, and is not there."""
    text = Path(__file__).parents[3].joinpath("gin_configs/seqio_tasks.gin").read_text()
    saved = tmp_path / "config.gin"
    saved.write_text(text.replace("'examples.wmt_tasks'", "'strangers_tasks'"), encoding="utf-8")

    def source_where(*allowed: str) -> Any:
        made: Any = config.load([saved], allowed_modules=allowed).experiment().data.corpus.source
        return made()

    source = source_where()
    with pytest.raises(InputError, match="--allow_module=strangers_tasks"):
        source.language_pairs()
    source = source_where("strangers_tasks")
    with pytest.raises(SettingError, match="a module that can be imported"):
        source.language_pairs()
