"""Wrong values of every setting of the demo's config, bound or at its default.

A wrong kind, 0, -1, None, '' and 10**12 are refused in one line before the corpus is built, unless
the annotation of the setting allows them.
"""

import ast
import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import pytest

from m4 import config
from m4.build import build
from m4.config import Config, canonical_name, parameters_of
from m4.data.samplers import Sampler
from m4.settings import InputError, SettingError, annotations_of, fits
from tests.command_line import TINY

DEMO = Path(__file__).parents[2] / "gin_configs" / "demo.gin"
WRONG = ["'x'", "0", "-1", "None", "''", str(10**12)]

READ = Config()
READ.read_file(str(DEMO))


def demo_with(binding: str) -> Config:
    """Returns the demo's config, which is read once, with a binding."""
    made = copy.copy(READ)
    made.__dict__ = {
        name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
        for name, value in vars(READ).items()
    }
    made.read_binding(binding)
    made.begin_from_macro()
    return made


def annotations() -> dict[str, Any]:
    """Returns setting -> annotation for all bindings and all defaults of the demo."""
    made = config.load([DEMO])
    made.experiment()
    found = {
        f"{canonical_name(target)}.{name}": annotations_of(target).get(name)
        for target in made._visited.values()
        for name in parameters_of(target)
    }
    # The kind and range of a setting under a scope are those of the setting itself.
    bound = {one.name: annotations_of(one.target).get(one.parameter) for one in made.bindings()}
    return found | bound


def refusal(binding: str) -> str | None:
    """Returns the message that refuses a binding, or None."""
    try:
        made = demo_with(binding)
        build(made.experiment(), None).check_training()
    except SettingError as error:
        return made.explain(error)
    except InputError as error:
        return str(error)
    return None


ANNOTATIONS = annotations()


@pytest.mark.parametrize("name", sorted(ANNOTATIONS))
def test_what_cannot_be_is_one_line_before_anything_starts(name: str) -> None:
    assert ANNOTATIONS[name] not in (None, Any), "no annotation: anything would be accepted"
    for value in WRONG:
        if fits(ast.literal_eval(value), ANNOTATIONS[name]):
            with contextlib.suppress(InputError):  # it does not fit to the others
                demo_with(f"{name} = {value}").experiment()
            continue
        said = refusal(f"{name} = {value}")
        assert said is not None, f"{name} = {value} is accepted"
        assert "\n" not in said, value
        assert name.rpartition(".")[2] in said, value


@pytest.mark.parametrize(
    ("name", "wrong", "allowed"),
    [
        ("experiment.Training.optimizer", "@schedules.rsqrt", "@optimizer.adamw"),
        ("experiment.Training.early_stopping", "@early_stopping.EarlyStopping", "with brackets"),
        ("experiment.Training.mesh", "@schedules.rsqrt", "@mesh.make_mesh"),
        ("experiment.Decoding.metrics", "(@optimizer.adamw,)", "to a Metric"),
        ("experiment.Data.sampler", "@optimizer.adamw", "a reference to a Sampler"),
        ("experiment.Experiment.model", "@moe.MoeLayer", "@transformer.Transformer"),
        ("corpus.CorpusSpec.source", "@optimizer.adamw", "@cldr.Cldr"),
        ("moe.MoeLayer.gate", "@moe.MoeLayer", "refers to itself"),
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
