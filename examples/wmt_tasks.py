"""seqio tasks as T5X's users have them: gin_configs/seqio_tasks.gin trains on them.

Two tasks of TensorFlow Datasets, and a mixture of them at rates by their size. Copy this file, put
your own tasks into it, and name it in MIXTURE_OR_TASK_MODULE.
"""

import functools
import os

import seqio
import tensorflow as tf

# T5X's vocabulary of 101 languages, or a SentencePiece model of yours.
VOCABULARY = seqio.SentencePieceVocabulary(
    os.environ.get("VOCABULARY", "gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model")
)
SPLITS = ["train", "validation", "test"]
FEATURES = {name: seqio.Feature(VOCABULARY, add_eos=True) for name in ("inputs", "targets")}


def translate(dataset: tf.data.Dataset, source: str, target: str) -> tf.data.Dataset:
    """{"de": ..., "en": ...} -> a prompt and its translation, as T5 has them."""

    def pair(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        prompt = tf.strings.join([f"translate {source} to {target}: ", example[source]])
        return {"inputs": prompt, "targets": example[target]}

    return dataset.map(pair, num_parallel_calls=tf.data.AUTOTUNE)


for name, source, target in (
    ("wmt16_translate/de-en:1.0.0", "de", "en"),
    ("wmt16_translate/ro-en:1.0.0", "en", "ro"),
):
    seqio.TaskRegistry.add(
        f"wmt16_{source}_{target}",
        # seqio's own annotations contradict each other here.
        source=seqio.TfdsDataSource(name, splits=SPLITS),  # pyright: ignore[reportArgumentType]
        preprocessors=[
            functools.partial(translate, source=source, target=target),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=FEATURES,
    )
seqio.MixtureRegistry.add(
    "wmt16",
    ["wmt16_de_en", "wmt16_en_ro"],
    default_rate=functools.partial(seqio.mixing_rate_num_examples, temperature=2.0),
)
