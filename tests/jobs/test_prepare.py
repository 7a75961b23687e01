"""The corpus of an experiment: opened, built, rebuilt, refused; sizes checked before it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from m4.build import build
from m4.data.corpus import CorpusSpec
from m4.data.samplers.learned import Learned
from m4.data.samplers.uniform import uniform
from m4.experiment import Baselines, Data, Experiment, Training
from m4.jobs.bilingual.baselines import baselines
from m4.jobs.decoding.report import report
from m4.jobs.decoding.testsets import decode
from m4.jobs.demo import demo
from m4.jobs.open_run import _programs
from m4.jobs.train import check_and_train
from m4.model.gates.by_direction import by_direction
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.parallel.mesh import make_mesh
from m4.parallel.platform.jax_setup import set_up
from m4.settings import SettingError
from m4.storage.run_folder import KINDS
from m4.train.average import averaged
from m4.train.early_stopping import EarlyStopping
from m4.train.multitask.groups import by_family
from m4.train.optimizer import adamw
from tests.data.corpus import Made


def experiment(folder: Path, pairs: int = 40, vocabulary_size: int = 400) -> Experiment:
    spec = CorpusSpec(source=Made({"gl": pairs}), vocabulary_size=vocabulary_size)
    model = functools.partial(Transformer, width=16, encoder_layers=1, decoder_layers=1)
    return Experiment(str(folder), Data(spec), Training(8, 8, adamw), model)


def stopped_early(one: Experiment) -> Experiment:
    """The experiment as one of bilingual models, which dev ends."""
    training = dataclasses.replace(one.training, early_stopping=EarlyStopping())
    return dataclasses.replace(one, training=training)


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"batch_size": 12}, "Training.batch_size"),  # 8 devices
        ({"grad_accum_steps": 3}, "Training.grad_accum_steps"),
        # An axis that only a parameter has.
        (
            {
                "batch_size": 12,
                "mesh": functools.partial(make_mesh, devices=jax.devices()[:6]),
                "extra_axis_rules": [("relpos_buckets", "data")],
            },
            "relpos_buckets = 32 must be divisible by 6",
        ),
    ],
)
def test_sizes_are_checked_before_the_corpus(
    tmp_path: Path, change: dict[str, Any], setting: str
) -> None:
    one = experiment(tmp_path)
    one = dataclasses.replace(one, training=dataclasses.replace(one.training, **change))
    with pytest.raises(ValueError, match=setting):
        check_and_train(one)
    if change == {"batch_size": 12}:
        alone = stopped_early(one)
        with pytest.raises(ValueError, match=setting):
            demo(dataclasses.replace(one, baselines=Baselines(alone, alone, alone)))
    assert not (tmp_path / "data").exists()


def test_tasks_are_of_the_languages_that_the_source_has(tmp_path: Path) -> None:
    """Two languages are two families here, although CorpusSpec.languages names none."""
    one = experiment(tmp_path)
    data = Data(dataclasses.replace(one.data.corpus, source=Made({"gl": 40, "sr_Latn": 40})))
    layer = functools.partial(MoeLayer, num_experts=2, gate=by_direction)
    model = functools.partial(one.model, moe=layer, moe_every=1)
    one = dataclasses.replace(one, data=data, model=model, tasks=by_family)
    assert sorted(set(build(one, None).model.tasks)) == [0, 1]


def test_what_cannot_be_decoded_or_reported_needs_no_corpus(tmp_path: Path) -> None:
    one = experiment(tmp_path)
    with pytest.raises(ValueError, match="no checkpoints; train first"):
        decode(one)
    for which in (one, dataclasses.replace(one, baselines=Baselines(one, one, one))):
        with pytest.raises(ValueError, match="no checkpoints; train first"):
            report(which)
    assert not tmp_path.joinpath("data").exists()


def test_baselines_that_cannot_be_need_no_corpus(tmp_path: Path) -> None:
    one = experiment(tmp_path)
    training = dataclasses.replace(one.training, optimizer=averaged)
    low = stopped_early(dataclasses.replace(one, training=training))
    one = stopped_early(one)
    with pytest.raises(SettingError, match=r"averaged\.optimizer"):
        baselines(dataclasses.replace(one, baselines=Baselines(one, one, low)))
    assert not (tmp_path / "data").exists()


def test_a_sampler_that_never_learns_is_refused(tmp_path: Path) -> None:
    def checked(sampler: Any, dev_period: int) -> None:
        one = experiment(tmp_path)
        training = dataclasses.replace(one.training, dev_period=dev_period)
        data = dataclasses.replace(one.data, sampler=sampler)
        build(dataclasses.replace(one, data=data, training=training), None).check_training()

    with pytest.raises(SettingError, match=r"Training.dev_period = 8: must be less than .* = 8"):
        checked(Learned(), 8)
    # One evaluation within the training is enough; a sampler that does not learn needs none.
    checked(Learned(), 7)
    checked(uniform, 8)


SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_enable_xla_caches",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def _users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX_COMPILATION_CACHE_DIR is not set, and the user's home is empty."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def said_by(program: Callable[[Any], Any], cache: Path | None) -> float:
    """Returns what a program computes of 2; without a cache as jobs set it up."""
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    jax.clear_caches()
    return float(jax.jit(program)(np.float32(2)))


@pytest.mark.usefixtures("_users_cache")
def test_no_job_runs_a_program_of_a_run_folder(tmp_path: Path) -> None:
    """It may be anybody's: here another program has the name of the right one."""
    run = tmp_path / "run"
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    for kind in KINDS:
        planted = run / "compilation_cache" / kind
        said_by(lambda x: 3 * x + 1, planted)
        said_by(lambda x: 5 * x, tmp_path / "other")
        (named,), (swapped,) = (list(at.glob("*-cache")) for at in (planted, tmp_path / "other"))
        named.write_bytes(swapped.read_bytes())
        assert said_by(lambda x: 3 * x + 1, planted) == 10.0  # it would be run
        for used in ((kind,), ()):
            jax.config.update("jax_compilation_cache_dir", None)
            set_up(_programs(run, str(run), used))
            assert said_by(lambda x: 3 * x + 1, None) == 7.0
    kept = tmp_path / "home" / "m4" / "compilation_cache"
    assert jax.config.values["jax_compilation_cache_dir"] == str(kept)
    assert any(kept.glob("*-cache"))  # for the next start


@pytest.mark.usefixtures("_users_cache")
def test_programs_are_kept_in_a_bucket(tmp_path: Path) -> None:
    """Not for a job that only reads there."""
    for kinds, folder in (
        (("train",), tmp_path / "copy" / "compilation_cache" / "train"),
        ((), tmp_path / "home" / "m4" / "compilation_cache"),
    ):
        jax.config.update("jax_compilation_cache_dir", None)
        set_up(_programs(tmp_path / "copy", "gs://bucket/run", kinds))
        assert jax.config.values["jax_compilation_cache_dir"] == str(folder)
