"""Every setting of the demo's config, bound or at its default, given a wrong kind, 0, -1, None, ''
and 10**12, is one line before the corpus is built: no traceback, no hang, nothing accepted that
means nothing."""

import copy
import re
from pathlib import Path

import pytest

from m4 import config
from m4.config.config import Config
from m4.jobs import prepare
from m4.settings import InputError, SettingError

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
    bound = {one.name for one in made.bindings()}
    # Of a setting under a scope the kind and range are those of the setting itself.
    defaults = set(re.findall(r"^([\w.]+\.\w+) = ", made.operative_text(), re.MULTILINE))
    return sorted(bound | defaults)


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
