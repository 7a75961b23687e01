"""The bilingual baselines of an experiment, and the folders where they are found again.

A baseline is an `Experiment` for one pair of languages, trained by the same trainer until the
scores on dev stop rising. It is kept in a folder named by the hash of everything that decides it,
so another multilingual run on the same text finds it there.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.corpus import bilingual
from m4.data.directions import key_of
from m4.data.samplers.proportional import proportional
from m4.data.stream.stream import Stream
from m4.eval.decoding.testsets import check_held_out
from m4.eval.scoring.levels import LEVELS
from m4.experiment import Baselines, Experiment, identity
from m4.jobs.bilingual.training import Baseline, train_all
from m4.jobs.corpus import open_corpus
from m4.jobs.decoding.testsets import command_of
from m4.model.transformer import abstract_variables
from m4.parallel import distributed
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError, SavedText, SettingError
from m4.storage.files import check_output
from m4.train.training import BY_DIRECTION

# Raise when a change of code changes what a baseline becomes.
FORMAT = 9

# The settings of a recipe's corpus that count; all others are the multilingual corpus's.
_VOCABULARIES = ("vocabulary_size", "target_vocabulary_size", "segmentations", "sampling_alpha")

# Settings of training that do not change the model, and so are no part of its hash.
_OPERATIONAL = ("checkpoint_period", "keep_checkpoints", "log_period", "tensorboard")
_OPERATIONAL += ("keep_period", "keep_best", "profile", "initial", "mesh", *BY_DIRECTION)
_OPERATIONAL += ("on_bad_step", "bad_steps", "parameter_rates")


class Finished(NamedTuple):
    """A finished baseline: its folder, that of its translations, the content of result.json."""

    language: str  # `key_of` its pair of languages
    folder: Path
    decodes: Path
    result: dict[str, Any]


def baselines(experiment: Experiment) -> dict[str, Finished]:
    """Trains and decodes the baselines that are missing; returns all, by `key_of` their pairs."""
    folder = baselines_of(experiment).folder
    check_baselines(baselines_of(experiment))
    cache = open_corpus(experiment)
    check_held_out(cache)
    missing = [one for one in plans_of(experiment, cache).values() if one.finished() is None]
    if missing and isinstance(folder, SavedText):
        raise SettingError(
            "Baselines.folder",
            folder,
            f"a folder with the baselines of {', '.join(one.language for one in missing)}: a saved "
            "config names no folder to write to; give it on the command line "
            "(--gin.experiment.Baselines.folder=...)",
        )
    if missing:
        check_output(missing[0].folder, f"Baselines.folder = {folder}")
        cores = len(available_cpus())
        workers = workers_for(jax.default_backend(), cores, distributed.is_distributed())
        train_all(missing, workers)
    return find_baselines(experiment, cache)


def find_baselines(experiment: Experiment, cache: Cache) -> dict[str, Finished]:
    """Returns the finished baselines by `key_of` their pairs; trains nothing."""
    plans = plans_of(experiment, cache)
    found = {
        name: Finished(name, one.folder, one.decodes(), result)
        for name, one in plans.items()
        if (result := one.finished()) is not None
    }
    if missing := [name for name in plans if name not in found]:
        raise InputError(
            f"no bilingual baseline of {', '.join(missing)}: train what is missing with "
            f"{command_of(experiment, 'baselines')}"
        )
    return found


def check_baselines(levels: Baselines) -> None:
    """SettingError: a bilingual model that cannot be made, or stops by what is not measured."""
    for one in map(levels.of, LEVELS):
        rule = one.training.early_stopping
        if rule is None:
            allowed = "@early_stopping.EarlyStopping(): dev ends the training of bilingual models"
            raise SettingError("Training.early_stopping", None, allowed)
        if not rule.by_chrf:
            allowed = "dev/chrf for bilingual models: bilingual/early_stopping.EarlyStopping.metric"
            raise SettingError("EarlyStopping.metric", rule.metric, f"{allowed} = 'dev/chrf'")
        abstract_variables(build(one, None).model)
        one.training.optimizer(one.training.total_steps)


def baselines_of(experiment: Experiment) -> Baselines:
    """Returns the experiment's baselines."""
    if experiment.baselines is None:
        levels = "; ".join(
            f"experiment.Baselines.{level} = @bilingual/{level}/experiment.Experiment()"
            for level in ("high", "medium", "low")
        )
        raise SettingError(
            "Experiment.baselines",
            None,
            f"set for this job; add: experiment.Experiment.baselines = @experiment.Baselines(); "
            f"{levels} (gin_configs/demo.gin has such lines)",
        )
    return experiment.baselines


def plans_of(experiment: Experiment, cache: Cache) -> dict[str, Baseline]:
    """Returns the baseline of each pair of languages by its `key_of`, trained or not."""
    levels = baselines_of(experiment)
    folder = Path(levels.folder or experiment.folder / "baselines")
    plans = {}
    for pair in cache.tested_pairs():
        language = key_of(pair)
        level = experiment.data.levels.of(cache.size(pair, "train"))
        base = levels.of(level)
        vocabularies = {name: getattr(base.data.corpus, name) for name in _VOCABULARIES}
        data = dataclasses.replace(
            base.data,
            data_dir=None,
            corpus=bilingual(cache, pair, **vocabularies),
            sampler=proportional,
            sample_by="examples",
            stream=Stream,
        )
        unset = dict.fromkeys(("profile", "initial", "parameter_rates", *BY_DIRECTION))
        training = dataclasses.replace(base.training, **unset)
        more = {"decoding": experiment.decoding, "baselines": None}
        one = dataclasses.replace(base, data=data, training=training, **more)
        about = _identity(one, cache, pair)
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        one = dataclasses.replace(one, model_dir=str(folder / f"{language}.{name}"))
        plans[language] = Baseline(language, level, one, about)
    return plans


def _identity(one: Experiment, cache: Cache, pair: str) -> dict[str, Any]:
    training = identity(one.training)
    corpus = one.data.corpus
    return {
        "format": FORMAT,
        "language": key_of(pair),
        # The text alone: where it stands in the multilingual corpus does not matter.
        "text": {
            split: {name: about[name] for name in ("pairs", "sha256")}
            for split, about in cache.manifest["language_pairs"][pair].items()
        },
        "mixture": corpus.mixture,
        "lengths": [cache.source_length, cache.target_length],
        **{name: corpus.settings()[name] for name in (*_VOCABULARIES, "normalization")},
        "model": identity(one.model),
        "vocabulary_multiple": one.vocabulary_multiple,
        "training": {k: v for k, v in training.items() if k not in _OPERATIONAL},
        # Greedy translations of dev end the training; the search of test sets decides no model.
        "longest": [one.decoding.max_source_length, one.decoding.max_target_length],
    }


def workers_for(platform: str, cores: int, is_distributed: bool) -> int:
    """Returns how many processes train baselines, one a CPU core, or 0 to train in this process.

    Several cannot share a TPU, and on a GPU each would take most of the memory. The other processes
    of a job wait for this one, so that a program for all devices would wait for them.
    """
    return cores if platform == "cpu" or is_distributed else 0
