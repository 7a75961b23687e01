"""Every setting of the demo's config, given a wrong kind, 0, -1, None, '' and 10**12, is one line
before the corpus is built: no traceback, no hang, nothing accepted that means nothing."""

from pathlib import Path

import pytest

from m4 import config
from m4.jobs import prepare
from m4.settings import InputError, SettingError

DEMO = Path(__file__).parents[2] / "gin_configs" / "demo.gin"
WRONG = ["'x'", "0", "-1", "None", "''", str(10**12)]

# What is no mistake: by the end of the setting's name, the values that mean something.
MEANT = {
    "Experiment.baselines": ["None"],
    "Experiment.model_dir": ["'x'"],
    "Training.total_steps": ["0"],
    "Training.seed": ["0"],
    "Training.early_stopping": ["None"],
    "Data.about": ["'x'", "None"],
    "ResourceLevels.high_resource_from": [],
    "ResourceLevels.low_resource_below": ["0"],
    "CorpusSpec.languages": ["None"],
    "CorpusSpec.target_vocabulary_size": ["None"],
    "Transformer.moe": ["None"],
    "Transformer.decoder_moe": ["None"],
    "Transformer.dropout_rate": ["0"],
    "MoeLayer.group_tokens": ["0"],
    "Schedule.hold_steps": ["0"],
    "rsqrt.hold_steps": ["0"],
    "rsqrt.warmup_steps": ["0"],
    "averaged.eta": ["0"],
    "EarlyStopping.min_delta": ["0"],
}


def given() -> list[tuple[str, str]]:
    made = config.load([DEMO])
    made.experiment()
    names = sorted({one.name for one in made.bindings()})
    return [(name, value) for name in names for value in WRONG]


def checked(binding: str) -> None:
    made = config.load([DEMO], [binding])
    try:
        prepare.check_sizes(made.experiment())
    except SettingError as error:
        raise InputError(made.explain(error)) from error


@pytest.mark.parametrize(("name", "value"), given())
def test_what_cannot_be_is_one_line_before_anything_starts(name: str, value: str) -> None:
    tail = ".".join(name.split(".")[-2:])
    if value in MEANT.get(tail, []):
        config.load([DEMO], [f"{name} = {value}"]).experiment()
        return
    with pytest.raises(InputError) as raised:
        checked(f"{name} = {value}")
    said = str(raised.value)
    assert "\n" not in said
    assert tail.split(".")[-1] in said
