"""seqio tasks and mixtures over m4's sources: the only file that imports seqio (4-14 s).

One seqio.Task a direction, `<prefix>.en_gl` (English to Galician) and `<prefix>.gl_en`, and three
seqio.Mixtures over them, `<prefix>.to_english`, `.from_english` and `.english_centric`. Their rates
are a sampler's (temperature's are those of seqio.mixing_rate_num_examples). The prefix keeps
several corpora apart in one process. So a stock seqio or T5X user has m4's data:

    tasks.register_cache(Cache("runs/demo/data"))
    seqio.get_mixture_or_task("m4.english_centric").get_dataset(
        {"inputs": 128, "targets": 128}, split="train", num_epochs=None)

Features are `inputs` ('<2gl> ' and the source) and `targets`, both with eos; splits are train, dev
and test, and T5X's name for dev, validation. m4's own training reads the same ids from the cache
(stream.py), with the mixture's rates.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.data.cache.cache import Cache
from m4.data.directions import MIXTURES, directions_of
from m4.data.preprocess import language_of, split_direction, tag_symbol
from m4.data.samplers import Sampler
from m4.data.samplers.temperature import temperature
from m4.data.sources import SPLITS, Pair, Source
from m4.data.stream import mixture as mixing
from m4.data.vocabulary.vocabulary import SPACE, without_tags
from m4.settings import InputError


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keeps TensorFlow's C++ quiet, which writes to file descriptor 2 before reading settings."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(kept, said.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


with _quiet_stderr():
    import seqio
    import seqio.vocabularies
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # they are JAX's

# Names of splits in T5X's run files.
_ALIASES = {"validation": "dev"}
# direction -> functions that seqio's Evaluator calls: (targets, predictions) -> {name: score}
MetricFns = Callable[[str], Sequence[Callable[..., Mapping[str, float]]]]
# (SHA-256 of a model, the change to it) -> tf-text's op
_TOKENIZERS: dict[tuple[str, Callable[[bytes], bytes]], Any] = {}
# prefix -> identity of the corpus
_REGISTERED: dict[str, dict[str, Any]] = {}
# task name -> direction: a code may have '_' in it, so the name alone is not enough.
_DIRECTIONS: dict[str, str] = {}


class SharedVocabulary(seqio.SentencePieceVocabulary):
    """A SentencePieceVocabulary with one tf-text op for each model, not for each use.

    At 200 tasks that is 1.7 GB of memory instead of 6.2 GB.
    """

    @property
    def tf_tokenizer(self) -> Any:
        return _tokenizer(self.sp_model or b"", bytes)

    def text_ids(self, text: tf.Tensor) -> tf.Tensor:
        """Returns the ids of a text, in which "<2gl>" is no tag."""
        return _tokenizer(self.sp_model or b"", without_tags).tokenize(text)


def _tokenizer(model: bytes, changed: Callable[[bytes], bytes]) -> Any:
    # Not in an attribute of the vocabulary: its __getstate__ and __eq__ must stay as they are.
    key = hashlib.sha256(model).hexdigest(), changed
    if key not in _TOKENIZERS:
        with tf.init_scope():
            made = seqio.vocabularies.tf_text.SentencepieceTokenizer(model=changed(model))
            _TOKENIZERS[key] = made
    return _TOKENIZERS[key]


class PairSource(seqio.DataSource):
    """One language of an m4 source as a seqio.DataSource: examples {english, translation}."""

    def __init__(self, source: Source, language: str) -> None:
        super().__init__(splits=(*SPLITS, *_ALIASES))
        self.source, self.language = source, language
        self._sizes: dict[str, int] = {}

    def pairs(self, split: str) -> Iterator[Pair]:
        """Returns the pairs as plain Python, without TensorFlow."""
        return self.source.pairs(self.language, _ALIASES.get(split, split))

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return False

    def list_shards(self, split: str) -> Sequence[str]:
        return [split]

    def num_input_examples(self, split: str) -> int:
        split = _ALIASES.get(split, split)
        if split not in self._sizes:
            if isinstance(self.source, Cache):
                self._sizes[split] = self.source.size(self.language, split)
            else:
                self._sizes[split] = sum(1 for _ in self.pairs(split))
        return self._sizes[split]

    def get_dataset(
        self,
        split: str = "train",
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **unused: Any,
    ) -> tf.data.Dataset:
        """Returns the pairs in the source's order; the task shuffles them in a buffer later."""
        if shard_info and shard_info.num_shards > 1:
            raise InputError(f"{self.language}: one shard only, use tf.data.Dataset.shard")
        if isinstance(self.source, Cache):
            # In the graph: an iterator over a cache can be checkpointed, a generator's cannot.
            path = str(self.source.text_file(self.language, _ALIASES.get(split, split)))
            lines = tf.data.TextLineDataset(path)
            return lines.map(_split_line, num_parallel_calls=tf.data.AUTOTUNE)
        return tf.data.Dataset.from_generator(
            lambda: (pair._asdict() for pair in self.pairs(split)),
            output_signature={
                side: tf.TensorSpec(shape=(), dtype=tf.string)  # pyright: ignore[reportCallIssue]
                for side in Pair._fields
            },
        )


def register(
    source: Source,
    languages: Sequence[str],
    vocabulary_path: str | os.PathLike[str],
    prefix: str = "m4",
    sampler: Sampler = temperature,
    target_vocabulary_path: str | os.PathLike[str] | None = None,
    mixtures: Sequence[str] = MIXTURES,
    unit: Mapping[str, float] | None = None,
    metric_fns: MetricFns = lambda direction: (),
) -> None:
    """Registers the tasks and mixtures of a corpus.

    Rates come from the number of training pairs of `source`. seqio's rates do not change: those of
    a schedule are of its first phase, those of a learned sampler from its beginning. A second call
    for the same corpus does nothing.

    Args:
        source: The corpus.
        languages: Its languages.
        vocabulary_path: SentencePiece model of sources, and of targets by default.
        prefix: Beginning of the names.
        sampler: Sizes -> rates. UniMax must be given its budget.
        target_vocabulary_path: SentencePiece model of targets, where that is another one.
        mixtures: Mixtures to register, with their tasks.
        unit: Size of a pair of each direction, where the sampler counts something else
            (`m4.data.stream.mixture`).
        metric_fns: Direction -> metrics of its task. T5X evaluates no task without metrics
            (`m4.t5x_tasks.metric_fns`).

    Raises:
        InputError: The prefix is another corpus's, or a vocabulary's file has changed since seqio
            read it in this process.
    """
    paths = [Path(p or vocabulary_path).resolve() for p in (None, target_vocabulary_path)]
    meaning = {
        "source": source.identity(),
        "languages": list(languages),
        "vocabularies": [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths],
        "paths": [str(path) for path in paths],
        "sampler": sampler,
        "mixtures": list(mixtures),
        "unit": dict(unit or {}),
    }
    if prefix in _REGISTERED:
        if _REGISTERED[prefix] == meaning:
            return
        raise InputError(
            f"seqio tasks {prefix}.* are registered for another corpus: give another prefix or "
            f"call tasks.unregister({prefix!r}) first"
        )
    features: dict[str, Any] = dict(zip(("inputs", "targets"), map(_feature, paths), strict=True))
    directions = {name: directions_of(name, languages) for name in mixtures}
    _REGISTERED[prefix] = meaning
    sources = {code: PairSource(source, code) for code in languages}
    for direction in dict.fromkeys(itertools.chain.from_iterable(directions.values())):
        _DIRECTIONS[task_name(direction, prefix)] = direction
        seqio.TaskRegistry.add(
            task_name(direction, prefix),
            source=sources[language_of(direction)],
            preprocessors=[
                functools.partial(_tokenize, direction=direction),
                seqio.CacheDatasetPlaceholder(),
                seqio.preprocessors.append_eos_after_trim,
            ],
            output_features=features,
            metric_fns=metric_fns(direction),
        )
    for name, of_mixture in directions.items():
        names = [task_name(direction, prefix) for direction in of_mixture]
        rates = _Rates(sampler, names, unit)
        seqio.MixtureRegistry.add(f"{prefix}.{name}", names, default_rate=rates)


def _feature(path: Path) -> Any:
    return seqio.Feature(vocabulary=SharedVocabulary(str(path)), add_eos=True)


def register_cache(
    cache: Cache,
    prefix: str = "m4",
    sampler: Sampler = temperature,
    sample_by: str = "examples",
    metric_fns: MetricFns = lambda direction: (),
) -> None:
    """Registers the tasks and mixtures of a tokenized corpus: its pairs, ids and rates.

    A corpus whose two vocabularies are made for one mixture has that one only.

    Args:
        cache: The corpus.
        prefix: Beginning of the names.
        sampler: Sizes -> rates.
        sample_by: Unit of the sizes, "examples" or "tokens".
        metric_fns: Direction -> metrics of its task.

    Raises:
        InputError: The corpus has ids of seqio tasks.
    """
    if not cache.marked:
        raise InputError(
            f"{cache.folder}: its ids are those of seqio tasks: use these tasks themselves"
        )
    mixtures = MIXTURES if cache.has_all_directions else (cache.mixture,)
    register(
        cache,
        cache.languages(),
        cache.source_vocabulary.path,
        prefix,
        sampler,
        cache.target_vocabulary.path,
        mixtures,
        {d: unit for name in mixtures for d, unit in mixing.units(cache, sample_by, name).items()},
        metric_fns,
    )


def unregister(prefix: str = "m4") -> None:
    """Removes the tasks and mixtures of a prefix from seqio's registries."""
    meaning = _REGISTERED.pop(prefix, {"languages": []})
    for name in MIXTURES:
        seqio.MixtureRegistry.remove(f"{prefix}.{name}")
    for code in meaning["languages"]:
        for direction in (f"en-{code}", f"{code}-en"):
            _DIRECTIONS.pop(task_name(direction, prefix), None)
            seqio.TaskRegistry.remove(task_name(direction, prefix))


def task_name(direction: str, prefix: str = "m4") -> str:
    """Returns the name of a task: 'en-gl' -> 'm4.en_gl'; seqio allows no '-'."""
    first, second = split_direction(direction)
    return f"{prefix}.{first}_{second}"


def mixture_rates(name: str) -> dict[str, float]:
    """Returns direction -> rate of a registered mixture of m4 tasks; they sum to 1."""
    mixture = seqio.MixtureRegistry.get(name)
    rates = {_DIRECTIONS[task.name]: float(mixture.get_rate(task)) for task in mixture.tasks}
    total = sum(rates.values())
    return {direction: rate / total for direction, rate in rates.items()}


class _Rates:
    """The rate function of a mixture: a sampler over the sizes of its tasks.

    Sizes are counted when the first rate is asked for.
    """

    def __init__(
        self, sampler: Sampler, names: Sequence[str], unit: Mapping[str, float] | None
    ) -> None:
        self._sampler = sampler
        self._names = {_DIRECTIONS[name]: name for name in names}
        self._unit = unit or dict.fromkeys(self._names, 1.0)

    def __call__(self, task: seqio.Task) -> float:
        return self._by_task[task.name]

    @functools.cached_property
    def _by_task(self) -> dict[str, float]:
        sizes = {}
        for direction, name in self._names.items():
            size = seqio.TaskRegistry.get(name).source.num_input_examples("train")
            assert size is not None, name
            sizes[direction] = round(size * self._unit[direction])
        rates = mixing.pair_rates(self._sampler(sizes), self._unit)
        return {name: rates.get(direction, 0.0) for direction, name in self._names.items()}


def _tokenize(
    dataset: tf.data.Dataset, direction: str, output_features: Mapping[str, Any]
) -> tf.data.Dataset:
    """Turns {english, translation} into the ids {inputs, targets} of a direction.

    The tag is in front of the inputs. Texts keep the names of seqio's `tokenize`.
    """
    first, second = split_direction(direction)
    source, target = ("english", "translation") if first == "en" else ("translation", "english")
    of = {name: feature.vocabulary for name, feature in output_features.items()}
    tag = tag_symbol(second)
    tag_id = of["inputs"].tokenizer.piece_to_id(SPACE + tag)

    def tokenized(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {
            "inputs_pretokenized": tf.strings.join([tag, " ", example[source]]),
            "inputs": tf.concat([[tag_id], of["inputs"].text_ids(example[source])], 0),
            "targets_pretokenized": example[target],
            "targets": of["targets"].text_ids(example[target]),
        }

    return dataset.map(tokenized, num_parallel_calls=tf.data.AUTOTUNE)


def _split_line(line: tf.Tensor) -> dict[str, tf.Tensor]:
    sides = tf.strings.split(line, "\t")
    return {"english": sides[0], "translation": sides[1]}
