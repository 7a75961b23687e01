"""seqio tasks and mixtures over a token cache: the only file that imports seqio (4-14 s).

Each direction is a seqio.Task: `<prefix>.en_gl` is English to Galician. Over them are the
seqio.Mixtures `<prefix>.to_english`, `.from_english`, `.english_centric` and `.direct`, those that
the corpus has directions of, with a sampler's rates (temperature's are those of
seqio.mixing_rate_num_examples). Prefixes keep several corpora apart in one process. So a user of
seqio or T5X has m4's data:

    tasks.register_cache(Cache("runs/demo/data"))
    seqio.get_mixture_or_task("m4.english_centric").get_dataset(
        {"inputs": 128, "targets": 128}, split="train", num_epochs=None)

Features are `inputs` ('<2gl> ' and the source) and `targets`, both with eos. Splits are train, dev
(also under T5X's name, validation) and test. m4's own training reads the same ids and rates from
the cache (stream.py).
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import seqio
import seqio.vocabularies
import tensorflow as tf

from m4.data.cache.cache import Cache
from m4.data.directions import (
    MIXTURES,
    Mixture,
    directions_of,
    is_synthetic,
    key_of,
    pair_of,
    reverse,
    sides_of,
    split_direction,
)
from m4.data.preprocess import SYNTHETIC, tag_symbol
from m4.data.samplers import Sampler
from m4.data.samplers.temperature import temperature
from m4.data.sources import SPLITS
from m4.data.stream import mixture as mixing
from m4.data.vocabulary.vocabulary import SPACE, escaped, without_tags
from m4.parallel.platform.hardware import cache_folder
from m4.settings import InputError
from m4.storage.files import whole

tf.config.set_visible_devices([], "GPU")  # they are JAX's

# Name of the mixture of a list of directions.
LISTED = "listed"
# Names of splits in T5X's run files.
_ALIASES = {"validation": "dev"}
# direction -> functions that seqio's Evaluator calls: (targets, predictions) -> {name: score}
MetricFns = Callable[[str], Sequence[Callable[..., Mapping[str, float]]]]
# prefix -> identity of the corpus
_REGISTERED: dict[str, dict[str, Any]] = {}


class SharedVocabulary(seqio.SentencePieceVocabulary):
    """A SentencePieceVocabulary with one tf-text op for each model, not for each use.

    At 200 tasks that is 1.7 GB of memory instead of 6.2 GB.
    """

    @property
    def tf_tokenizer(self) -> Any:
        return _tokenizer(self.sp_model or b"", bytes)

    def text_ids(self, text: tf.Tensor, normalises: bool) -> tf.Tensor:
        """Returns the ids of a text, or of its NFC; "<2gl>" in it is no tag."""
        if normalises:  # as `m4.data.preprocess` and `escaped`
            normal: Any = seqio.vocabularies.tf_text.normalize_utf8(text, "NFC")
            single = tf.strings.strip(tf.strings.regex_replace(normal, " +", " "))
            text = tf.strings.regex_replace(single, SPACE, escaped(SPACE))
        return _tokenizer(self.sp_model or b"", without_tags).tokenize(text)


# Not in an attribute of the vocabulary: its __getstate__ and __eq__ must stay as they are.
@functools.cache
def _tokenizer(model: bytes, changed: Callable[[bytes], bytes]) -> Any:
    """Returns tf-text's op of a model that is changed."""
    with tf.init_scope():
        return seqio.vocabularies.tf_text.SentencepieceTokenizer(model=changed(model))


class PairSource(seqio.DataSource):
    """One pair of languages of a cache as a seqio.DataSource: examples {first, second}."""

    def __init__(self, cache: Cache, pair: str) -> None:
        super().__init__(splits=(*SPLITS, *_ALIASES))
        self.cache, self.pair = cache, pair

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return False

    def list_shards(self, split: str) -> Sequence[str]:
        return [split]

    def num_input_examples(self, split: str) -> int:
        return self.cache.size(self.pair, _ALIASES.get(split, split))

    def get_dataset(
        self, split: str = "train", shuffle: bool = True, seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None, **unused: Any,
    ) -> tf.data.Dataset:  # fmt: skip
        """Returns the pairs in the cache's order; the task shuffles them in a buffer later."""
        if shard_info and shard_info.num_shards > 1:
            raise InputError(f"{self.pair}: one shard only, use tf.data.Dataset.shard")
        split = _ALIASES.get(split, split)
        # A file with a line a pair, which is written once on this machine. In the graph: an
        # iterator over a file can be checkpointed, a generator's cannot.
        corpora = cache_folder() / "pairs" / self.cache.fingerprint
        if not (path := corpora / f"{split}.{key_of(self.pair)}.tsv").is_file():
            with whole(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
                pairs = self.cache.pairs(self.pair, split)
                file.writelines(f"{first}\t{second}\n" for first, second in pairs)
        lines = tf.data.TextLineDataset(str(path))
        return lines.map(_split_line, num_parallel_calls=tf.data.AUTOTUNE)


def register_cache(
    cache: Cache, prefix: str = "m4", sampler: Sampler = temperature, sample_by: str = "examples",
    metric_fns: MetricFns = lambda direction: (),
) -> None:  # fmt: skip
    """Registers the tasks and mixtures of a tokenized corpus: its pairs, ids and rates.

    A corpus whose two vocabularies are made for one mixture has that one only. seqio's rates do not
    change: those of a schedule are of its first phase, those of a learned sampler from its
    beginning. A second call for the same corpus does nothing.

    Args:
        sampler: Sizes -> rates. UniMax must be given its budget.
        metric_fns: Direction -> metrics of its task. T5X evaluates no task without metrics
            (`m4.t5x_tasks.metric_fns`).

    Raises:
        InputError: The corpus has ids of seqio tasks, or the prefix is another corpus's.
    """
    if not cache.marked:
        said = "its ids are those of seqio tasks: use these tasks themselves"
        raise InputError(f"{cache.folder}: {said}")
    meaning = {
        "corpus": cache.fingerprint, "folder": str(cache.folder.resolve()),
        "pairs": cache.language_pairs(), "sampler": sampler, "sample_by": sample_by,
        "mixture": cache.mixture,
    }  # fmt: skip
    if prefix in _REGISTERED:
        if _REGISTERED[prefix] == meaning:
            return
        raise InputError(
            f"seqio tasks {prefix}.* are registered for another corpus: give another prefix or "
            f"call tasks.unregister({prefix!r}) first"
        )
    own = cache.mixture if isinstance(cache.mixture, str) else LISTED
    mixtures: dict[str, Mixture] = {own: cache.mixture}
    if cache.has_all_directions:
        mixtures |= {name: name for name in MIXTURES}
    features: dict[str, Any] = {
        name: seqio.Feature(SharedVocabulary(str(vocabulary.path.resolve())), add_eos=True)
        for name, vocabulary in (
            ("inputs", cache.source_vocabulary),
            ("targets", cache.target_vocabulary),
        )
    }
    normalises = cache.source_vocabulary.normalises
    directions = {
        name: found
        for name, mixture in mixtures.items()
        if (found := directions_of(mixture, cache.language_pairs()))
    }
    every = [*dict.fromkeys(itertools.chain.from_iterable(directions.values()))]
    unit = mixing.units(cache, sample_by, every)
    _REGISTERED[prefix] = meaning
    sources = {pair: PairSource(cache, pair) for pair in cache.language_pairs()}
    for direction in every:
        seqio.TaskRegistry.add(
            task_name(direction, prefix),
            source=sources[pair_of(direction)],
            preprocessors=[
                functools.partial(_tokenize, direction=direction, normalises=normalises),
                seqio.CacheDatasetPlaceholder(),
                seqio.preprocessors.append_eos_after_trim,
            ],
            output_features=features,
            metric_fns=metric_fns(direction),
        )
    for name, of_mixture in directions.items():
        names = {direction: task_name(direction, prefix) for direction in of_mixture}
        rates = _rates(cache, sampler, names, unit)
        seqio.MixtureRegistry.add(f"{prefix}.{name}", list(names.values()), rates)


def unregister(prefix: str = "m4") -> None:
    """Removes the tasks and mixtures of a prefix from seqio's registries."""
    meaning = _REGISTERED.pop(prefix, {"pairs": []})
    for name in (*MIXTURES, LISTED):
        seqio.MixtureRegistry.remove(f"{prefix}.{name}")
    for pair in meaning["pairs"]:
        for direction in (pair, reverse(pair)):
            seqio.TaskRegistry.remove(task_name(direction, prefix))


def task_name(direction: str, prefix: str = "m4") -> str:
    """Returns the name of a task: 'en-gl' -> 'm4.en_gl'; seqio allows no '-' or '~'."""
    first, second = split_direction(direction)
    return f"{prefix}.{first}_{second}".replace("~", ".")


def _rates(
    cache: Cache, sampler: Sampler, names: Mapping[str, str], unit: Mapping[str, float]
) -> Callable[[seqio.Task], float]:
    """Returns the rate function of a mixture: a sampler over the sizes of its tasks."""

    @functools.cache
    def by_task() -> dict[str, float]:
        pairs = {direction: cache.size(pair_of(direction), "train") for direction in names}
        sizes = {direction: round(pairs[direction] * unit[direction]) for direction in names}
        rates = mixing.pair_rates(sampler(sizes), unit)
        return {name: rates.get(direction, 0.0) for direction, name in names.items()}

    return lambda task: by_task()[task.name]


def _tokenize(
    dataset: tf.data.Dataset, direction: str, normalises: bool, output_features: Mapping[str, Any]
) -> tf.data.Dataset:
    """Turns {first, second} into the ids {inputs, targets} of a direction, inputs with a tag."""
    source, target = sides_of(direction)
    of = {name: feature.vocabulary for name, feature in output_features.items()}
    from_, to = split_direction(direction)
    tags = [tag_symbol(to)] + [SYNTHETIC] * is_synthetic(from_)
    tag_ids = [of["inputs"].tokenizer.piece_to_id(SPACE + tag) for tag in tags]

    def tokenized(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {
            "inputs_pretokenized": tf.strings.join([*tags, example[source]], " "),
            "inputs": tf.concat([tag_ids, of["inputs"].text_ids(example[source], normalises)], 0),
            "targets_pretokenized": example[target],
            "targets": of["targets"].text_ids(example[target], normalises),
        }

    return dataset.map(tokenized, num_parallel_calls=tf.data.AUTOTUNE)


def _split_line(line: tf.Tensor) -> dict[str, tf.Tensor]:
    sides = tf.strings.split(line, "\t")
    return {"first": sides[0], "second": sides[1]}
