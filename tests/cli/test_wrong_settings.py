"""Every setting of the demo's config, bound or at its default, given a wrong kind, 0, -1, None, ''
and 10**12, is one line before the corpus is built: no traceback, no hang, nothing accepted that
means nothing."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

from m4 import config
from m4.config.bindings import parameters_of
from m4.config.config import Config
from m4.config.names import canonical_name
from m4.data.samplers import Sampler
from m4.jobs import prepare
from m4.settings import InputError, SettingError, fits

DEMO = Path(__file__).parents[2] / "gin_configs" / "demo.gin"
WRONG = ["'x'", "0", "-1", "None", "''", str(10**12)]

# What is no mistake: by the end of the setting's name, the values that mean something.
MEANT = {
    "Experiment.baselines": ["None"],
    "Experiment.model_dir": ["'x'"],
    "Training.total_steps": ["0"],
    "Training.keep_period": ["None"],
    "Training.keep_best": ["0"],
    "Training.seed": ["0"],
    "Training.label_smoothing": ["0"],
    "Training.z_loss": ["0"],
    "Training.aux_loss_factor": ["0"],
    "Training.router_z_loss_factor": ["0"],
    "Training.early_stopping": ["None"],
    "Training.loss_weights": ["None"],
    "Training.learning_rates": ["None"],
    "Training.gradients": ["None"],
    "Training.cosines": ["None"],
    "Training.initial": ["None"],
    "Training.profile": ["None"],
    "Data.about": ["'x'", "None"],
    "Data.data_dir": ["'x'", "None"],
    "Decoding.alpha": ["0"],
    "Decoding.sampling": ["None"],
    "Decoding.test_sentences": ["None"],
    "Decoding.prefix": ["'x'", "None"],
    "Decoding.min_length": ["0"],
    "Decoding.no_repeat_ngram": ["0"],
    "Baselines.folder": ["'x'", "None"],
    "ResourceLevels.high_resource_from": [],
    "ResourceLevels.low_resource_below": ["0"],
    "ResourceLevels.min_test_sentences": ["0"],
    "CorpusSpec.languages": ["None"],
    "CorpusSpec.target_vocabulary_size": ["None"],
    "CorpusSpec.vocabulary_from": ["'x'", "None"],
    "CorpusSpec.workers": ["None"],
    "Cldr.seed": ["0"],
    "temperature.maximum": ["None", "1000000000000"],
    "Transformer.moe": ["None"],
    "Transformer.decoder_moe": ["None"],
    "Transformer.dropout_rate": ["0"],
    "Transformer.directions": ["0"],
    "Transformer.source_vocab_size": ["None"],
    "Transformer.pipeline_microbatches": ["0"],
    "MoeLayer.group_tokens": ["0"],
    "MoeLayer.mlp_width": ["None"],
    "MoeLayer.train_capacity_factor": ["None"],
    "MoeLayer.eval_capacity_factor": ["None"],
    "MoeLayer.decode_capacity_factor": ["None"],
    "MoeLayer.activations": ["None"],
    "MoeLayer.dropout_rate": ["0", "None"],
    "MoeLayer.output_masking": ["0"],
    "MoeLayer.vocab_size": ["0"],
    "MoeLayer.directions": ["0"],
    "Schedule.hold_steps": ["0"],
    "rsqrt.hold_steps": ["0"],
    "rsqrt.warmup_steps": ["0"],
    "rsqrt.cooldown_steps": ["0"],
    "averaged.eta": ["0"],
    "muon.beta": ["0"],
    "muon.b1": ["0"],
    "muon.b2": ["0"],
    "EarlyStopping.min_delta": ["0"],
}


READ = Config()
READ.read_file(str(DEMO))


def demo_with(binding: str) -> Config:
    """The demo's config, read once, with a binding."""
    made = copy.copy(READ)
    made.__dict__ = {
        name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
        for name, value in vars(READ).items()
    }
    made.read_binding(binding)
    made.begin_from_macro()
    return made


def names() -> list[str]:
    made = config.load([DEMO])
    made.experiment()
    # Of a setting under a scope the kind and range are those of the setting itself.
    every = {
        f"{canonical_name(target)}.{name}"
        for target in made._visited.values()
        for name in parameters_of(target)
    }
    return sorted({one.name for one in made.bindings()} | every)


def refusal(binding: str) -> str | None:
    """What is said of a binding; None: nothing."""
    try:
        made = demo_with(binding)
        prepare.check_sizes(made.experiment())
    except SettingError as error:
        return made.explain(error)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", names())
def test_what_cannot_be_is_one_line_before_anything_starts(name: str) -> None:
    tail = ".".join(name.split(".")[-2:])
    for value in WRONG:
        if value in MEANT.get(tail, []):
            demo_with(f"{name} = {value}").experiment()
            continue
        said = refusal(f"{name} = {value}")
        assert said is not None, f"{name} = {value} is accepted"
        assert "\n" not in said, value
        assert tail.split(".")[-1] in said, value


TINY = Path(__file__).parents[1] / "testdata" / "tiny.gin"


@pytest.mark.parametrize(
    ("name", "wrong", "allowed"),
    [
        ("experiment.Training.optimizer", "@schedules.rsqrt", "@optimizer.adamw"),
        ("experiment.Training.early_stopping", "@optimizer.adamw", "EarlyStopping()"),
        ("experiment.Training.early_stopping", "@early_stopping.EarlyStopping", "with brackets"),
        ("experiment.Training.mesh", "@schedules.rsqrt", "@mesh.make_mesh"),
        ("experiment.Training.gradients", "@optimizer.adamw", "a Surgery"),
        ("experiment.Training.loss_weights", "@optimizer.adamw", "a dictionary"),
        ("experiment.Decoding.metrics", "(@optimizer.adamw,)", "to a Metric"),
        ("experiment.Data.sampler", "@optimizer.adamw", "@temperature.temperature"),
        ("experiment.Data.stream", "@optimizer.adamw", "a Stream"),
        ("experiment.Experiment.model", "@moe.MoeLayer", "@transformer.Transformer"),
        ("experiment.Experiment.training", "@optimizer.adamw", "a Training"),
        ("experiment.Baselines.high", "@optimizer.adamw", "@experiment.Experiment()"),
        ("corpus.CorpusSpec.source", "@optimizer.adamw", "@cldr.Cldr"),
        ("moe.MoeLayer.gate", "@optimizer.muon", "@top2_gshard.top2_gshard"),
        ("moe.MoeLayer.gate", "@moe.MoeLayer", "refers to itself"),
        ("moe.MoeLayer.dispatch", "@schedules.rsqrt", "@gather.gather"),
        ("experiment.Decoding.beams", "1000000", "from 1 to 1,024"),
        ("schedules.rsqrt.peak", "100000", "to 1,000"),
        ("experiment.Experiment.vocabulary_multiple", "1000000", "from 1 to 65,536"),
    ],
)
def test_a_reference_of_a_wrong_kind_is_refused_by_the_config(
    name: str, wrong: str, allowed: str
) -> None:
    made = config.load([TINY], ["MODEL_DIR=unused", f"{name} = {wrong}"])
    with pytest.raises(InputError) as said:
        made.experiment()
    assert "\n" not in str(said.value)
    assert f"{name} = {wrong}: " in str(said.value)
    assert allowed in str(said.value).split(f"{name} = {wrong}: ")[-1]


def _with_a_word(sizes, drawn):
    return sizes


def _of_two(sizes, more):
    return sizes


class _Says:
    def __call__(self, sizes: dict[str, int]) -> "dict[str, float]":
        return dict.fromkeys(sizes, 1.0)


@pytest.mark.parametrize(
    ("value", "may"),
    [
        (lambda sizes: sizes, True),
        (lambda *args, **kwargs: None, True),
        (_with_a_word, True),
        (_Says(), True),
        (_of_two, False),
        (functools.partial(_of_two, more=1), True),
        (_Says, False),
        (lambda: {}, False),
    ],
)
def test_a_users_sampler_is_refused_only_where_it_cannot_be_one(value: Any, may: bool) -> None:
    assert fits(value, Sampler) is may
