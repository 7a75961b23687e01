"""`m4 baselines`: one small model a language pair, by the same trainer, until dev stops rising.

On CPUs many small models train best next to each other, one a core: a pool of processes, one a
core, takes one language after the other; compiled steps are kept on disk for all. (One
vmapped program of n models is slower than n single ones: docs/performance.md.) On an accelerator
this process trains them one after the other (`workers_for`). A finished model is kept under the
hash of everything that decides it, so another multilingual run on the same text finds it.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from m4.data.cache.cache import Cache
from m4.data.corpus import bilingual
from m4.data.samplers.proportional import proportional
from m4.data.stream.stream import Stream
from m4.eval.decoding.testsets import check_held_out
from m4.experiment import Baselines, Experiment, SavedFolder, identity
from m4.jobs import prepare
from m4.jobs.bilingual.progress import Progress, rate, step_flops
from m4.jobs.bilingual.training import start_worker, train_in_worker, train_one
from m4.jobs.corpus import open_corpus
from m4.parallel import distributed
from m4.parallel.platform import signals
from m4.parallel.platform.cpus import available_cpus
from m4.progress import ProgressBar, duration
from m4.settings import InputError, SettingError
from m4.storage.files import read_json
from m4.train.bad_steps import BadStep
from m4.train.training import BY_DIRECTION

# Raise when a change of code changes what a baseline becomes.
FORMAT = 7

# What a recipe says of its corpus; all else is the parent's.
_VOCABULARIES = ("vocabulary_size", "target_vocabulary_size", "segmentations", "sampling_alpha")

# What does not change the model: not part of its hash.
_OPERATIONAL = ("checkpoint_period", "keep_checkpoints", "log_period", "tensorboard")
_OPERATIONAL += ("keep_period", "keep_best", "profile", "initial", "mesh", *BY_DIRECTION)
_OPERATIONAL += ("on_bad_step", "bad_steps")


@dataclasses.dataclass(frozen=True)
class BaselinePlan:
    """One baseline to train. experiment: its own, with model_dir; text: SHA-256 and pairs by split;
    identity: everything that decides it, as JSON."""

    language: str
    level: str
    experiment: Experiment
    identity: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """At most."""
        return self.experiment.training.total_steps

    @property
    def folder(self) -> Path:
        return Path(self.experiment.model_dir)

    @property
    def train_pairs(self) -> int:
        return self.identity["text"]["train"]["pairs"]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished baseline: its folder (with decodes/) and result.json."""

    language: str
    folder: Path
    result: dict[str, Any]


def baselines(experiment: Experiment) -> dict[str, Finished]:
    """Trains and decodes the baselines that are missing; returns all, by language.

    Raises:
        SettingError: the experiment names no baselines.
        ValueError: a language without dev or test sentences.
        m4.train.bad_steps.BadStep: a model diverged.
    """
    prepare.check_baselines(baselines_of(experiment))
    cache = open_corpus(experiment)
    check_held_out(cache)
    plans = plans_of(experiment, cache)
    missing = {name: plan for name, plan in plans.items() if _finished(plan) is None}
    if missing:
        folder = baselines_of(experiment).folder
        if isinstance(folder, SavedFolder):
            raise SettingError(
                "Baselines.folder",
                folder,
                f"a folder with the baselines of {', '.join(missing)}: a saved config names no "
                "folder to write to; give it on the command line "
                "(--gin.experiment.Baselines.folder=...)",
            )
        _report_other_versions(missing)
        cores = len(available_cpus())
        workers = workers_for(jax.default_backend(), cores, distributed.is_distributed())
        _run(missing, progress_of(plans, missing), workers)
    return find_baselines(experiment, cache)


def find_baselines(experiment: Experiment, cache: Cache) -> dict[str, Finished]:
    """The finished baselines by language; nothing is trained.

    Raises:
        ValueError: some are missing; the command that trains them.
    """
    plans = plans_of(experiment, cache)
    found = {name: _finished(plan) for name, plan in plans.items()}
    if missing := [name for name, one in found.items() if one is None]:
        raise InputError(
            f"no bilingual baseline of {', '.join(missing)}: train what is missing with "
            f"m4 baselines --model_dir={experiment.model_dir}"
        )
    return {name: one for name, one in found.items() if one is not None}


def baselines_of(experiment: Experiment) -> Baselines:
    """The experiment's baselines. SettingError: it has none; the lines to add to a config."""
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


def plans_of(experiment: Experiment, cache: Cache) -> dict[str, BaselinePlan]:
    """What is to be trained for each language."""
    levels = baselines_of(experiment)
    folder = levels.folder or prepare.run_folder(experiment) / "baselines"
    plans = {}
    for language in cache.languages():
        level = experiment.data.levels.of(cache.size(language, "train"))
        base = levels.of(level)
        one = dataclasses.replace(
            base,
            data=dataclasses.replace(
                base.data,
                data_dir=None,
                corpus=bilingual(
                    cache,
                    language,
                    **{name: getattr(base.data.corpus, name) for name in _VOCABULARIES},
                ),
                sampler=proportional,
                sample_by="examples",
                stream=Stream,
            ),
            training=dataclasses.replace(
                base.training, profile=None, initial=None, **dict.fromkeys(BY_DIRECTION)
            ),
            decoding=experiment.decoding,
            baselines=None,
        )
        about = _identity(one, cache, language)
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        one = dataclasses.replace(one, model_dir=str(Path(folder) / f"{language}.{name}"))
        plans[language] = BaselinePlan(language, level, one, about)
    return plans


def _identity(one: Experiment, cache: Cache, language: str) -> dict[str, Any]:
    training = identity(one.training)
    corpus = one.data.corpus
    return {
        "format": FORMAT,
        "language": language,
        # The text alone: where it stands in the parent's arrays does not matter.
        "text": {
            split: {name: about[name] for name in ("pairs", "sha256")}
            for split, about in cache.manifest["languages"][language].items()
        },
        "mixture": corpus.mixture,
        "lengths": [cache.source_length, cache.target_length],
        **{name: corpus.settings()[name] for name in _VOCABULARIES},
        "model": identity(one.model),
        "vocabulary_multiple": one.vocabulary_multiple,
        "training": {k: v for k, v in training.items() if k not in _OPERATIONAL},
        # Greedy translations of dev end training; how test sets are searched decides no model.
        "longest": [one.decoding.max_source_length, one.decoding.max_target_length],
    }


def _trained(plan: BaselinePlan) -> Finished | None:
    """Of which the translations may be of another search than is asked for."""
    path = plan.folder / "result.json"
    if not path.is_file():
        return None

    def parse(result: dict[str, Any]) -> Finished:
        _ = result["note"]["best_step"], result["stopped_early"], float(result["gain_last_quarter"])
        return Finished(plan.language, plan.folder, result)

    return read_json(path, parse, f"delete {plan.folder} to train it again")


def _finished(plan: BaselinePlan) -> Finished | None:
    one = _trained(plan)
    asked = plan.experiment.decoding.translated()
    return one if one is not None and one.result.get("translated") == asked else None


def _report_other_versions(missing: Mapping[str, BaselinePlan]) -> None:
    """One line on stdout where an older m4 kept baselines, which are not found again."""
    old = []
    for plan in missing.values():
        for path in plan.folder.parent.glob(f"{plan.language}.*/result.json"):
            with contextlib.suppress(InputError):  # a damaged one is not used either
                of = read_json(
                    path, lambda found: dict(found.get("identity", found.get("plan", {})))
                )
                if of.get("format") != FORMAT:
                    old.append(path.parent.name)
    if old:
        print(f"baselines: {len(old)} of another version of m4 are not used: {', '.join(old)}")


def workers_for(platform: str, cores: int, is_distributed: bool) -> int:
    """How many processes train baselines, each on a CPU core; 0: this process, on its devices.

    Several processes cannot share a TPU, and on a GPU each would take most of the memory. Where the
    job has several processes, the others wait for this one, and a program for all devices would
    wait for them: the accelerators rest, and this machine's cores do the work.
    """
    return cores if platform == "cpu" or is_distributed else 0


def progress_of(plans: Mapping[str, BaselinePlan], missing: Mapping[str, BaselinePlan]) -> Progress:
    """Of the missing models; by those that are there it knows how many steps they will take."""
    trained = {name: _trained(plan) for name, plan in plans.items()}
    return Progress(
        {name: plan.steps for name, plan in missing.items()},
        {plan.level: step_flops(plan.experiment) for plan in missing.values()},
        {name: plan.level for name, plan in plans.items()},
        {
            name: one.result["note"]["step"] / plans[name].steps
            for name, one in trained.items()
            if one is not None
        },
    )


def _announce(shown: Progress, workers: int) -> None:
    """One line on stdout before anything is trained: what, and how long it will take."""
    models, steps, most = shown.to_train()
    if there := len(shown.steps) - models:
        print(f"baselines: {there} trained models to translate their test sets")
    if not models:
        return
    device = jax.devices()[0]
    platform = "cpu" if workers else device.platform
    where = f"{workers} CPU cores" if workers else f"{jax.device_count()} {device.device_kind}"
    seconds = shown.flops_left() / rate(platform)
    print(
        f"baselines: {models} models to train, about {steps:,} steps, at most {most:,}; about "
        f"{duration(seconds)} on {where}, then their test sets to translate"
    )


def _run(plans: Mapping[str, BaselinePlan], shown: Progress, workers: int) -> None:
    """Trains what is planned, the longest first, in so many processes; 0: in this one.

    Raises:
        BadStep: one of them diverged.
        m4.train.trainer.Interrupted: in this process; the step is saved.
    """
    ordered = sorted(plans.values(), key=lambda plan: -plan.train_pairs)
    _announce(shown, workers)
    with ProgressBar("bilingual baselines", sum(shown.steps.values()), "steps") as bar:
        if workers:
            _run_in_workers(ordered, shown, bar, workers)
            return

        def heard(*message: Any) -> None:
            shown.heard(*message)
            bar.update(*shown.line())

        for plan in ordered:
            with _named(plan.language):
                devices = jax.devices()
                shown.finished(*train_one(plan.experiment, plan.identity, devices, heard))
            bar.update(*shown.line())


def _run_in_workers(
    ordered: Sequence[BaselinePlan], shown: Progress, bar: ProgressBar, workers: int
) -> None:
    # spawn: a forked child would share the parent's JAX threads and hang.
    context = multiprocessing.get_context("spawn")
    messages, others = context.Queue(), {*multiprocessing.active_children()}
    with signals.held(), worker_pool(min(workers, len(ordered)), context, messages) as pool:
        waiting: set[Future] = set()
        try:
            languages = {
                pool.submit(train_in_worker, plan.experiment, plan.identity): plan.language
                for plan in ordered
            }
            waiting = {*languages}
            while waiting:
                ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in ended:
                    with _named(languages[future]):
                        shown.finished(*future.result())
                while (message := _next(messages)) is not None:
                    shown.heard(*message)
                bar.update(*shown.line())
        finally:
            # At a signal, or where one has failed: the others save their steps.
            for future in waiting:
                future.cancel()
            for worker in {*multiprocessing.active_children()} - others if waiting else ():
                worker.terminate()


def worker_pool(workers: int, context: Any, messages: Any) -> ProcessPoolExecutor:
    """Processes that end with this one; each has one core and one CPU device."""
    cores = context.Queue()
    for core in available_cpus():
        cores.put(core)
    return ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=start_worker,
        initargs=(os.getpid(), cores, messages, jax.config.values["jax_compilation_cache_dir"]),
    )


@contextlib.contextmanager
def _named(language: str) -> Iterator[None]:
    """Says whose a loss is that is not finite."""
    try:
        yield
    except BadStep as error:
        raise BadStep(f"bilingual model {language}: {error}") from error


def _next(messages: Any) -> tuple[str, int, str] | None:
    try:
        return messages.get_nowait()
    except queue.Empty:
        return None
