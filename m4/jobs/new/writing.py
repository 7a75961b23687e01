"""The gin file: complete, with what people change first as macros at its head."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from m4.jobs.new.choosing import BASELINE_STEPS, Choice, Size
from m4.jobs.new.looking import FoundCorpus

_MODULES = {
    "m4": ["experiment"],
    "m4.data": ["corpus"],
    "m4.data.samplers": ["direction_weights", "temperature"],
    "m4.model": ["moe", "transformer"],
    "m4.model.gates": ["top2_gshard"],
    "m4.parallel": ["mesh"],
    "m4.train": ["average", "early_stopping", "optimizer", "schedules"],
}

_TEXT = Template("""\
$head
from __gin__ import dynamic_registration

$imports
# --------------------------------------------------------------------- what people change first
MODEL_DIR = $model_dir
TEXT_DIR = $folder
LANGUAGES = [
$languages
]
MIXTURE_OR_TASK_NAME = 'english_centric'  # or 'to_english', 'from_english'
# Into English alone: corpus.CorpusSpec.target_vocabulary_size = 8000 (docs/data.md, "Vocabulary")
TASK_FEATURE_LENGTHS = {'inputs': $length, 'targets': $length}  # pieces; longer pairs are left out
VOCABULARY_SIZE = $vocabulary_size
TEMPERATURE = 1.5  # 1: as pairs, 100: all alike; docs/lab/2026-11-25-tatoeba.md says why
TRAIN_STEPS = $steps
BATCH_SIZE = $batch_size  # packed rows of $length + $length pieces, about $pairs pairs
LEARNING_RATE = $rate
DROPOUT_RATE = $dropout
WIDTH = $width
MLP_WIDTH = $mlp_width
HEADS = $heads  # of 32: the width again
LAYERS = $layers  # of the encoder, and of the decoder
EXPERTS = $experts  # in every other feed-forward layer
BASELINE_STEPS = $baseline_steps  # of a bilingual model at most: its dev chrF ends it earlier
TEST_SENTENCES = $test_sentences  # of a direction at most; None: all
# ------------------------------------------------------------------------------------ the data
corpus.CorpusSpec.source = @$source
$source.folder = %TEXT_DIR
$settings
corpus.CorpusSpec.languages = %LANGUAGES
corpus.CorpusSpec.mixture = %MIXTURE_OR_TASK_NAME
corpus.CorpusSpec.lengths = %TASK_FEATURE_LENGTHS
corpus.CorpusSpec.vocabulary_size = %VOCABULARY_SIZE
corpus.CorpusSpec.vocabulary_temperature = %TEMPERATURE
# Cleaning: normalise, empty, duplicates, overlap (docs/data.md). Stricter:
#   from m4.data.cleaning import clean
#   corpus.CorpusSpec.cleaning = @clean.thorough()
experiment.Data.sampler = @direction_weights.DirectionWeights()
direction_weights.DirectionWeights.sampler = @temperature.temperature
direction_weights.DirectionWeights.from_english = 0.6  # many languages to write, into English one
temperature.temperature.temperature = %TEMPERATURE
experiment.ResourceLevels.high_resource_from = $high  # training pairs
experiment.ResourceLevels.low_resource_below = $low
# ----------------------------------------------------------------------------------- the model
experiment.Experiment.model = @transformer.Transformer
transformer.Transformer.width = %WIDTH
transformer.Transformer.heads = %HEADS
transformer.Transformer.head_width = 32
transformer.Transformer.mlp_width = %MLP_WIDTH
transformer.Transformer.encoder_layers = %LAYERS
transformer.Transformer.decoder_layers = %LAYERS
transformer.Transformer.dropout_rate = %DROPOUT_RATE
transformer.Transformer.absolute_positions = True  # docs/model.md says why
transformer.Transformer.dtype = $dtype
transformer.Transformer.moe = @moe.MoeLayer  # None: the dense model
moe.MoeLayer.num_experts = %EXPERTS
moe.MoeLayer.group_tokens = $group_tokens  # 0: one group, the whole batch
moe.MoeLayer.gate = @top2_gshard.top2_gshard
# -------------------------------------------------------------------------------- the training
experiment.Experiment.model_dir = %MODEL_DIR
experiment.Training.total_steps = %TRAIN_STEPS
experiment.Training.batch_size = %BATCH_SIZE
experiment.Training.mesh = @mesh.make_mesh
experiment.Training.router_z_loss_factor = 1.0e-3  # else the router saturates (docs/decisions.md)
experiment.Training.dev_period = $dev_period
experiment.Training.checkpoint_period = $dev_period  # what a killed run loses at most
experiment.Training.optimizer = @average.averaged  # in place of a rate that falls at the end
average.averaged.optimizer = @optimizer.muon  # docs/decisions.md: fewer steps than AdamW
optimizer.muon.schedule = @schedules.rsqrt
optimizer.muon.matrix_rate = 4.0
optimizer.muon.experts = True  # docs/lab/2026-11-25-tatoeba.md
schedules.rsqrt.peak = %LEARNING_RATE
schedules.rsqrt.warmup_steps = $warmup
schedules.rsqrt.hold_steps = 1000000  # one rate after the warm-up, however long
# -------------------------------------------------------------------------------- the decoding
experiment.Decoding.beams = 4
experiment.Decoding.max_source_length = $length
experiment.Decoding.max_target_length = $length
experiment.Decoding.batch_rows = 32
experiment.Decoding.test_sentences = %TEST_SENTENCES
# ------------------------- bilingual baselines: the same experiment, but for what a scope says
experiment.Baselines.high = @bilingual/high/experiment.Experiment()
experiment.Baselines.medium = @bilingual/medium/experiment.Experiment()
experiment.Baselines.low = @bilingual/low/experiment.Experiment()
bilingual/corpus.CorpusSpec.vocabulary_size = $bilingual_vocabulary_size
bilingual/corpus.CorpusSpec.target_vocabulary_size = None  # one for both sides
bilingual/experiment.Experiment.vocabulary_multiple = 8
bilingual/transformer.Transformer.moe = None
bilingual/transformer.Transformer.width = $bilingual_width
bilingual/transformer.Transformer.heads = $bilingual_heads
bilingual/transformer.Transformer.mlp_width = $bilingual_mlp_width
bilingual/transformer.Transformer.encoder_layers = $bilingual_layers
bilingual/transformer.Transformer.decoder_layers = $bilingual_layers
bilingual/transformer.Transformer.dropout_rate = 0.0
bilingual/transformer.Transformer.dtype = 'float32'
bilingual/experiment.Training.total_steps = %BASELINE_STEPS
bilingual/experiment.Training.batch_size = $bilingual_rows
bilingual/experiment.Training.router_z_loss_factor = 0.0  # they have none
bilingual/experiment.Training.dev_period = 750
bilingual/experiment.Training.checkpoint_period = 1000
bilingual/experiment.Training.keep_checkpoints = 1
bilingual/experiment.Training.log_period = 50
bilingual/experiment.Training.tensorboard = False
bilingual/experiment.Training.early_stopping = @early_stopping.EarlyStopping()
bilingual/early_stopping.EarlyStopping.min_delta = 0.75  # 1 chrF in 1,000 steps
bilingual/optimizer.muon.matrix_rate = 1.6666666666666667
bilingual/schedules.rsqrt.peak = $bilingual_rate
bilingual/schedules.rsqrt.warmup_steps = 200
bilingual/schedules.rsqrt.hold_steps = 400
bilingual/low/transformer.Transformer.dropout_rate = 0.1
bilingual/low/experiment.Training.dev_period = 250
bilingual/low/early_stopping.EarlyStopping.patience = 2
bilingual/low/early_stopping.EarlyStopping.min_delta = 0.5
""")
# Of the demo's models and batches, by pilots; a wider model has a lower one.
_RATE, _RATE_WIDTH = 7e-3, 128
_BILINGUAL_RATE, _BILINGUAL_RATE_WIDTH = 1.2e-2, 64


def gin_text(
    choice: Choice,
    layout: FoundCorpus,
    folder: str,
    model_dir: str,
    pairs: float,
    head: Sequence[str],
) -> str:
    """The gin file. pairs: of a step. head: lines of its comment."""
    size, bilingual = choice.size, choice.bilingual
    return _TEXT.substitute(
        head="\n".join(f"# {line}".rstrip() for line in head),
        imports=_imports(layout),
        model_dir=repr(model_dir),
        folder=repr(folder),
        languages=_wrapped(choice.languages),
        length=choice.length,
        vocabulary_size=choice.vocabulary_size,
        # docs/lab/2026-11-25-tatoeba.md: 1,000 pieces cost 9 chrF where there is much text.
        bilingual_vocabulary_size=choice.vocabulary_size // 2,
        bilingual_width=bilingual.width,
        bilingual_heads=bilingual.width // 32,
        bilingual_mlp_width=4 * bilingual.width,
        bilingual_layers=bilingual.layers,
        bilingual_rows=choice.bilingual_rows,
        bilingual_rate=f"{_rate(_BILINGUAL_RATE, _BILINGUAL_RATE_WIDTH, bilingual):.1e}",
        steps=choice.steps,
        batch_size=choice.batch_size,
        pairs=round(pairs),
        rate=f"{_rate(_RATE, _RATE_WIDTH, size):.1e}",
        dropout=choice.dropout_rate,
        width=size.width,
        mlp_width=4 * size.width,
        heads=size.width // 32,
        layers=size.layers,
        experts=size.experts,
        dtype=repr(size.dtype),
        group_tokens=0 if size.dtype == "float32" else 2048,
        baseline_steps=BASELINE_STEPS,
        test_sentences=choice.test_sentences,
        source=layout.name,
        settings=_settings(layout.name, {"on_bad_line": "skip", **layout.settings}),
        high=choice.levels.high_resource_from,
        low=choice.levels.low_resource_below,
        dev_period=max(20, min(500, choice.steps // 4)),
        warmup=max(10, min(200, choice.steps // 5)),
    )


def _rate(rate: float, width: int, size: Size) -> float:
    return rate * math.sqrt(width / size.width)


def _imports(layout: FoundCorpus) -> str:
    modules = {**_MODULES, "m4.data.sources": [layout.module]}
    return "\n".join(
        f"from {package} import {name}" for package in sorted(modules) for name in modules[package]
    )


def _settings(source: str, settings: Mapping[str, Any]) -> str:
    return "\n".join(f"{source}.{name} = {value!r}" for name, value in settings.items())


def _wrapped(languages: Sequence[str]) -> str:
    """A list's items, a few a line, by falling size."""
    rows = [languages[at : at + 12] for at in range(0, len(languages), 12)]
    return "\n".join("    " + " ".join(f"{code!r}," for code in row) for row in rows)


def commands(out: str, model_dir: str, languages: Sequence[str]) -> dict[str, str]:
    """What each is for -> the three commands to paste. languages: of the trial."""
    listed = shlex.quote("[" + ", ".join(f'"{code}"' for code in languages) + "]")
    out, trial = shlex.quote(out), shlex.quote(f"{model_dir}_trial")
    short = "--gin.TRAIN_STEPS=40 --gin.BASELINE_STEPS=40 --gin.TEST_SENTENCES=50"
    return {
        "what would be trained on": f"m4 data preview --gin_file={out}",
        f"all of it in small, 40 steps on {len(languages)} languages": (
            f"m4 demo --gin_file={out} --model_dir={trial} {short} --gin.LANGUAGES={listed}"
        ),
        "the full run; the same command resumes it": f"m4 demo --gin_file={out}",
    }


def write(path: Path, text: str) -> None:
    """The file, which must not be there."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
