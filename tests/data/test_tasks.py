"""Stock seqio gives the ids and the rates of the cache. Importing seqio alone takes seconds."""

import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import jax
import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.directions import MIXTURES, ROLES, SIDES, pair_of, reverse
from m4.data.samplers.schedule import Schedule
from m4.data.samplers.temperature import temperature
from m4.data.samplers.uniform import uniform
from m4.data.sources import SPLITS
from m4.data.sources.tsv import Tsv
from m4.data.stream import mixture as mixing
from m4.model.transformer import Transformer, abstract_variables
from tests.data.arrays import Ids, of_text, unpacked
from tests.data.arrays import tokens as tokens_of
from tests.data.corpus import Made
from tests.documents.blocks import ROOT

pytestmark = [
    pytest.mark.slow,
    # seqio's and TensorFlow's own, not m4's.
    pytest.mark.filterwarnings("default"),
]
LENGTHS = {"inputs": 24, "targets": 20}
OF_T5X = "include|import|from t5x|adafactor|decoding|models|moe_models|moe_trainer|infer_s|MODEL"


@pytest.fixture(scope="module")
def tasks() -> Any:
    return importlib.import_module("m4.data.tasks")


@pytest.fixture
def registered(tasks: Any, made_cache: Cache) -> Iterator[Cache]:
    tasks.register_cache(made_cache)
    yield made_cache
    tasks.unregister()


def mixture_rates(seqio: Any, name: str) -> dict[str, float]:
    """Returns direction -> rate of a mixture of m4's tasks; the rates sum to 1."""
    mixture = seqio.MixtureRegistry.get(name)
    rates = {}
    for task in mixture.tasks:
        pair = task.source.pair
        forward = task.name.partition(".")[2] == pair.replace("-", "_")
        rates[pair if forward else reverse(pair)] = float(mixture.get_rate(task))
    total = sum(rates.values())
    return {direction: rate / total for direction, rate in rates.items()}


def ids_of(dataset: Any) -> list[Ids]:
    return [
        (tuple(example["inputs"].tolist()), tuple(example["targets"].tolist()))
        for example in dataset.as_numpy_iterator()
    ]


def wanted(made: Cache, direction: str, split: str) -> list[Ids]:
    return of_text(made, direction, split, LENGTHS["inputs"], LENGTHS["targets"])


@pytest.mark.parametrize("split", [*SPLITS, "validation"])  # T5X's name of dev
@pytest.mark.parametrize("direction", ["en-gl", "gl-en", "en-sr_Latn", "sr_Latn-en"])
def test_a_task_gives_the_ids_of_the_cache(
    tasks: Any, registered: Cache, direction: str, split: str
) -> None:
    task = tasks.seqio.get_mixture_or_task(tasks.task_name(direction))
    got = ids_of(task.get_dataset(LENGTHS, split, shuffle=False))
    split = split.replace("validation", "dev")
    assert got == wanted(registered, direction, split)
    assert task.num_input_examples(split) == registered.size(pair_of(direction), split)
    assert any(len(inputs) == LENGTHS["inputs"] for inputs, _ in got), "some are trimmed"


def test_signs_and_normal_forms_are_those_of_the_cache(tasks: Any, tmp_path: Path) -> None:
    """Compares with the corpus, whose training pairs m4's own stream lays out."""
    for split in SPLITS:
        words = [f"{a}{b}{split}" for a in "abcdefgh" for b in "ijklmnop"]
        odd = "\u2581 cafe\u0301 \ufb01n \u00bd\u00a0\u2122 \u2047"
        lines = [f"red <2gl> {word} {odd}\t<2en> <2gl> {word} roxo {odd}\n" for word in words]
        (tmp_path / f"gl.{split}.tsv").write_text("".join(lines))
    made = CorpusSpec(Tsv(tmp_path), ["gl"], vocabulary_size=320).build(tmp_path / "c")
    tags = {made.vocabulary.tag_id(code) for code in ("en", "gl")}
    assert tokens_of(made, "train", "first", "source")[0].tolist() == [
        i for pair in made.pairs("en-gl", "train") for i in made.vocabulary.encode([pair.first])[0]
    ]
    for side, role in itertools.product(SIDES, ROLES):
        assert not tags.intersection(tokens_of(made, "train", side, role)[0].tolist())
    tasks.register_cache(made, "tags")
    task = tasks.seqio.get_mixture_or_task("tags.gl_en")
    assert ids_of(task.get_dataset(LENGTHS, "dev", shuffle=False)) == wanted(made, "gl-en", "dev")
    (example, *_) = task.get_dataset(LENGTHS, "dev", shuffle=False).as_numpy_iterator()
    assert example["inputs_pretokenized"].startswith(b"<2en> <2en> <2gl> aidev roxo")
    tasks.unregister("tags")


@pytest.mark.parametrize("name", MIXTURES)
def test_rates_are_those_of_seqio(tasks: Any, registered: Cache, name: str) -> None:
    rates = temperature(Cache(registered.folder, name).sizes())
    assert mixture_rates(tasks.seqio, f"m4.{name}") == pytest.approx(rates, rel=1e-12)
    mixture = tasks.seqio.MixtureRegistry.get(f"m4.{name}")
    own = [tasks.seqio.mixing_rate_num_examples(t, temperature=5.0) for t in mixture.tasks]
    shares = [share / sum(own) for share in own]
    assert [*map(mixture.get_rate, mixture.tasks)] == pytest.approx(shares, rel=1e-12)
    assert len(own) == len(rates)


def test_rates_of_other_samplers_and_by_tokens(tasks: Any, registered: Cache) -> None:
    schedule = Schedule([(0, uniform, ["gl", "pt-en"]), (50, uniform, None)])
    tasks.register_cache(registered, "first", schedule, "tokens")
    rates = mixture_rates(tasks.seqio, "first.english_centric")
    (first, _) = mixing.phases(registered, schedule, "tokens")
    assert {name: rate for name, rate in rates.items() if rate} == pytest.approx(first.rates)
    assert set(rates) == set(registered.directions)  # seqio knows the others, at rate 0
    tasks.unregister("first")


def test_feature_converter_of_t5x(tasks: Any, registered: Cache) -> None:
    """The batch that T5X's encoder-decoder trains on has the same names and ids."""
    dataset = tasks.seqio.get_dataset(
        mixture_or_task_name="m4.gl_en", task_feature_lengths={"inputs": 96, "targets": 96},
        dataset_split="dev", shuffle=False,
        feature_converter=tasks.seqio.EncDecFeatureConverter(pack=False),
    )  # fmt: skip
    batch = unpacked(registered, "gl-en", "dev")
    for row, example in enumerate(dataset.as_numpy_iterator()):
        for key in ("encoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights"):
            assert example[key].tolist() == batch[key][row].tolist(), key
        # Without packing seqio's inputs have the eos too, in the first place of the padding.
        inside = batch["decoder_segment_ids"][row] > 0
        inputs = "decoder_input_tokens"
        assert example[inputs][inside].tolist() == batch[inputs][row][inside].tolist()
    features = tasks.seqio.EncDecFeatureConverter(pack=True).get_model_feature_lengths(LENGTHS)
    assert set(batch) == {*features, "direction_ids", "encoder_direction_ids"}


def test_inputs_and_targets_have_separate_vocabularies(tasks: Any, tmp_path: Path) -> None:
    made = CorpusSpec(
        Made({"gl": 60}), mixture="to_english", vocabulary_size=400, target_vocabulary_size=350
    ).build(tmp_path / "c")
    tasks.register_cache(made, "own")
    (task,) = tasks.seqio.get_mixture_or_task("own.to_english").tasks
    assert task.name == "own.gl_en"
    assert ids_of(task.get_dataset(LENGTHS, "dev", shuffle=False)) == wanted(made, "gl-en", "dev")
    with pytest.raises(ValueError, match=r"own\.english_centric"):
        tasks.seqio.get_mixture_or_task("own.english_centric")
    tasks.unregister("own")


def test_seqio_evaluates_the_tasks_of_a_cache(tasks: Any, made_cache: Cache) -> None:
    """Evaluates as T5X does: predictions are scored with BLEU and chrF, as m4's own."""
    from m4 import t5x_tasks
    from m4.eval.metrics.bleu import bleu
    from m4.eval.metrics.chrf import chrf

    t5x_tasks.register(str(made_cache.folder), "scored")
    task = tasks.seqio.get_mixture_or_task("scored.en_gl")
    references = [pair.second for pair in made_cache.pairs("en-gl", "dev")]
    guesses = [text.replace("1", "2") for text in references]
    for function, metric in zip(task.predict_metric_fns, (bleu, chrf), strict=True):
        counted = metric(guesses, references, "gl")
        assert function(references, guesses) == {counted.metric: counted.value()}
        assert 0 < counted.value() < 100
    assert not tasks.seqio.get_mixture_or_task("scored.gl_en").score_metric_fns
    tasks.unregister("scored")


def test_a_model_of_t5x_gets_the_vocabulary_of_its_tasks(tasks: Any, made_cache: Cache) -> None:
    from m4 import t5x_tasks

    folder = str(made_cache.folder)
    feature = t5x_tasks.inputs_vocabulary(folder)
    task = tasks.seqio.get_mixture_or_task("m4.en_gl")
    assert feature == task.output_features["inputs"].vocabulary
    size = made_cache.source_vocabulary.size
    assert t5x_tasks.vocab_size(folder, multiple=1) == size
    assert size <= t5x_tasks.vocab_size(folder) < size + 128
    assert t5x_tasks.vocab_size(folder) % 128 == 0
    assert t5x_tasks.source_vocab_size(folder) is None
    t5x_tasks.register.cache_clear()
    tasks.unregister()


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_configs_for_t5x_make_one_model(kind: str, made_cache: Cache) -> None:
    """Their statements of m4's parts, as gin reads them; those of T5X's own need T5X."""
    made = []
    for job in ("pretrain", "finetune", "eval", "infer"):
        text = (ROOT / f"gin_configs/t5x/{job}_{kind}.gin").read_text(encoding="utf-8")
        statements = re.findall(r"^[^\s#].*\n(?:[ #].*\n|\n)*", text, re.MULTILINE)
        own = [one for one in statements if not re.match(OF_T5X, one)]
        try:
            gin.parse_config("".join(own).replace("'runs/demo/data'", repr(str(made_cache.folder))))
            made.append(gin.get_configurable(Transformer)())
        finally:
            gin.clear_config()
    assert {one.vocab_size for one in made} == {-(-made_cache.source_vocabulary.size // 128) * 128}
    assert {one.moe is not None for one in made} == {kind == "moe"}
    shapes = [jax.tree.map(lambda leaf: leaf.shape, abstract_variables(one)) for one in made]
    assert shapes[0]["params"]
    assert all(each == shapes[0] for each in shapes)
