"""A module as T5X's users have it: it registers tasks and a mixture when it is imported.

M4_TEST_TASKS names a folder with <task>.<split>.tsv and a SentencePiece model.
"""

import functools
import os
from typing import Any

import seqio as installed
import tensorflow as tf

seqio: Any = installed  # its annotations contradict each other

FOLDER = os.environ["M4_TEST_TASKS"]
VOCABULARY = seqio.SentencePieceVocabulary(f"{FOLDER}/sentencepiece.model", extra_ids=10)
FEATURES = dict.fromkeys(("inputs", "targets"), seqio.Feature(VOCABULARY, add_eos=True))
RATES = {"made_en_gl": 3.0, "made_gl_en": 1.0, "made_en_pt": seqio.mixing_rate_num_examples}


def split_lines(dataset: tf.data.Dataset, prefix: str, turned: bool) -> tf.data.Dataset:
    def split(line: tf.Tensor) -> dict[str, tf.Tensor]:
        sides = tf.strings.split(line, "\t")
        inputs, targets = (sides[1], sides[0]) if turned else (sides[0], sides[1])
        return {"inputs": tf.strings.join([prefix, inputs]), "targets": targets}

    return dataset.map(split)


def same_words(targets: list[str], predictions: list[str]) -> dict[str, float]:
    """Returns the share of predictions that equal their targets."""
    same = [a == b for a, b in zip(targets, predictions, strict=True)]
    return {"same_words": sum(same) / len(same)}


def longer(targets: list[str], scores: list[float]) -> dict[str, float]:
    """Returns a metric of scores, a kind that m4 lacks."""
    return {"longer": 0.0}


def add(name: str, language: str, turned: bool, splits: tuple[str, ...]) -> None:
    files = {split: f"{FOLDER}/{language}.{split}.tsv" for split in splits}
    sizes = {"train": 40 if language == "gl" else 20, "validation": 12, "test": 12}
    seqio.TaskRegistry.add(
        name,
        source=seqio.TextLineDataSource(files, num_input_examples=sizes),
        preprocessors=[
            functools.partial(split_lines, prefix=f"{name}: ", turned=turned),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=FEATURES,
        metric_fns=[same_words, longer] if name == "made_en_gl" else [same_words],
    )


_ALL = ("train", "validation", "test")
add("made_en_gl", "gl", False, _ALL)
add("made_gl_en", "gl", True, _ALL)
add("made_en_pt", "pt", False, ("train",))
seqio.MixtureRegistry.add("made_all", [*RATES.items()])
GALICIAN = seqio.TextLineDataSource({s: f"{FOLDER}/gl.{s}.tsv" for s in _ALL})
seqio.TaskRegistry.add(
    "made_bytes",
    source=GALICIAN,
    preprocessors=[
        functools.partial(split_lines, prefix="", turned=False),
        seqio.preprocessors.tokenize,
        seqio.preprocessors.append_eos,
    ],
    output_features=dict.fromkeys(FEATURES, seqio.Feature(seqio.ByteVocabulary())),
)
seqio.MixtureRegistry.add("made_uncounted", ["made_bytes"], seqio.mixing_rate_num_examples)
seqio.TaskRegistry.add(
    "made_language_model",
    source=GALICIAN,
    preprocessors=[
        lambda dataset: dataset.map(lambda line: {"targets": line}),
        seqio.preprocessors.tokenize,
        seqio.preprocessors.append_eos,
    ],
    output_features={"targets": seqio.Feature(VOCABULARY)},
)
