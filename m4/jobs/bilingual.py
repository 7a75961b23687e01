"""The bilingual baselines of an experiment: their folders and their training.

A baseline is an `Experiment` for one pair of languages, trained by the same trainer until its dev
scores stop rising. Its folder is named by the hash of everything that decides it, so that another
multilingual run on the same text finds it there.

On CPUs many small models train fastest side by side: each process of a pool has one core and trains
one language after the other. All share compiled steps on disk. (One vmapped program of n models is
slower than n single ones: docs/decisions.md.) On an accelerator, this process trains the models one
after the other.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import queue
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.corpus import bilingual
from m4.data.directions import key_of
from m4.data.samplers.proportional import proportional
from m4.data.stream.stream import Stream
from m4.eval.decoding.decode import translations
from m4.eval.decoding.hypotheses import decode_to_files, hypotheses_path
from m4.eval.decoding.testsets import Portion, check_held_out
from m4.eval.scoring.levels import LEVELS
from m4.experiment import Baselines, Experiment, identity
from m4.jobs.corpus import open_corpus
from m4.jobs.decoding.testsets import command_of
from m4.model.transformer import abstract_variables
from m4.parallel import distributed
from m4.parallel.mesh import make_mesh
from m4.parallel.platform import signals
from m4.parallel.platform.hardware import available_cpus
from m4.parallel.platform.jax_setup import set_up
from m4.parallel.platform.signals import end_with
from m4.progress import ProgressBar
from m4.settings import InputError, SavedText, SettingError
from m4.storage.files import check_output, read_json, write_json
from m4.storage.metrics_log import read_metrics
from m4.storage.records import count, flag, number, record
from m4.train import loop
from m4.train.bad_steps import BadStep
from m4.train.training import BY_DIRECTION, Training

_NOTE = record({"best_step": count, "step": count})
_RESULT = record({"note": _NOTE, "stopped_early": flag, "gain_last_quarter": number})

# (language, step, text): progress of a model.
Report = Callable[[str, int, str], None]


@dataclasses.dataclass(frozen=True)
class Baseline:
    """One bilingual baseline."""

    language: str  # `key_of` its pair of languages
    experiment: Experiment  # The experiment of the baseline; its `model_dir` is `folder`.
    identity: Mapping[str, Any]  # everything that decides the model, as JSON

    @property
    def folder(self) -> Path:
        """Folder with the checkpoints, the translations (`decodes`) and result.json."""
        return self.experiment.folder

    @property
    def result(self) -> dict[str, Any]:
        """Content of result.json, or {} where the model is not trained yet."""
        path = self.folder / "result.json"
        if not path.is_file():
            return {}
        return read_json(path, _RESULT, remedy=f"delete {self.folder} to train it again")

    @property
    def decodes(self) -> Path:
        """Folder of the translations: decodes/, or a folder in it for other decoding settings."""
        own = self.result.get("translated", {})
        return self.folder / "decodes" / self.experiment.decoding.trial(own)

    @property
    def finished(self) -> bool:
        """True if the model is trained and has translated with the experiment's settings."""
        folder, names = self.decodes, self.experiment.data.corpus.directions()
        paths = [hypotheses_path(folder, "test", name).with_suffix(".json") for name in names]
        return bool(self.result) and all(path.is_file() for path in paths)


def train_all(missing: Sequence[Baseline], workers: int) -> None:
    """Trains and decodes baselines, the largest first; 0 workers means in this process."""
    ordered = sorted(missing, key=lambda one: -one.identity["text"]["train"]["pairs"])
    shown = Progress({one.language: one.experiment.training.total_steps for one in ordered})
    for one in ordered:
        if trained := one.result:  # trained, but its test sets are not translated
            shown.finished(one.language, trained["note"]["step"])
    shown.announce(f"{workers} CPU cores" if workers else f"{jax.device_count()} devices")
    with ProgressBar("bilingual baselines", shown.line()[-1], "steps") as bar:
        if workers:
            _train_in_workers(ordered, shown, bar, workers)
            return

        def report(*message: Any) -> None:
            shown.heard(*message)
            bar.update(*shown.line())

        for one in ordered:
            shown.finished(*train_one(one, jax.devices(), report))
            bar.update(*shown.line())


class Progress:
    """Progress bar of the steps of all models; its total shrinks when a model ends early."""

    def __init__(self, steps: Mapping[str, int]) -> None:  # maximum number of steps of each model
        self._most = dict(steps)
        self._done = dict.fromkeys(steps, 0)
        self._texts: dict[str, str] = {}
        self._ended: set[str] = set()

    def announce(self, where: str) -> None:
        if self._ended:
            print(f"baselines: {len(self._ended)} trained models to translate their test sets")
        if left := self._most.keys() - self._ended:
            steps = sum(self._most[name] for name in left)
            print(f"baselines: {len(left)} models to train, at most {steps:,} steps, on {where}")

    def heard(self, language: str, step: int, text: str) -> None:
        if language not in self._ended:
            self._done[language], self._texts[language] = step, f"{language} {text}"

    def finished(self, language: str, step: int) -> None:
        self._ended.add(language)
        self._done[language] = self._most[language] = step
        self._texts.pop(language, None)

    def line(self) -> tuple[int, str, int]:
        """Returns (steps done, text, total as known so far) for a bar."""
        models = f"{len(self._ended)}/{len(self._most)} models"
        text = " · ".join([models, *self._texts.values()])
        return sum(self._done.values()), text, sum(self._most.values())


def _train_in_workers(
    ordered: Sequence[Baseline], shown: Progress, bar: ProgressBar, workers: int
) -> None:
    # spawn: a forked child would share the parent's JAX threads and hang.
    context = multiprocessing.get_context("spawn")
    messages, cores = context.Queue(), context.Queue()
    for core in available_cpus():
        cores.put(core)
    others = {*multiprocessing.active_children()}
    programs = jax.config.values["jax_compilation_cache_dir"]
    given, most = (os.getpid(), cores, messages, programs), min(workers, len(ordered))
    pool = ProcessPoolExecutor(most, context, initializer=start_worker, initargs=given)
    with signals.held(), pool:
        waiting: set[Future] = set()
        try:
            waiting = {pool.submit(train_in_worker, one) for one in ordered}
            while waiting:
                ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in ended:
                    shown.finished(*future.result())
                with contextlib.suppress(queue.Empty):
                    while True:
                        shown.heard(*messages.get_nowait())
                bar.update(*shown.line())
        finally:
            # After a signal or the failure of one worker, the others save their steps.
            for future in waiting:
                future.cancel()
            for worker in {*multiprocessing.active_children()} - others if waiting else ():
                worker.terminate()


_to_parent: Any = None  # message queue of a worker process


def start_worker(parent: int, cores: Any, messages: Any, programs: str | None) -> None:
    """Prepares a worker process, which ends with its parent and computes on one CPU core."""
    end_with(parent)
    # The parent also gets Ctrl-C, and ends its workers by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.watch()
    global _to_parent
    _to_parent = messages
    # The parent holds the TPU or most of a GPU's memory, and fake devices would share the core.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    set_up(programs)
    if sys.platform == "linux":
        with contextlib.suppress(queue.Empty):  # more workers than cores, if the user asks for it
            os.sched_setaffinity(0, {cores.get_nowait()})


def train_in_worker(one: Baseline) -> tuple[str, int]:
    """Calls `train_one` in a process of the pool; SIGTERM saves the step and raises Interrupted."""
    before = signals.install()
    try:
        signals.check()
        return train_one(one, jax.devices(), lambda *message: _to_parent.put(message))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def mesh_for(training: Training, devices: Sequence[Any]) -> Mesh:
    """Returns a data-parallel mesh of as many devices as divide a batch's rows."""
    rows = training.batch_size // training.grad_accum_steps
    count = max(n for n in range(1, len(devices) + 1) if rows % n == 0)
    return make_mesh(data=count, devices=devices[:count])


def train_one(one: Baseline, devices: Sequence[Any], report: Report) -> tuple[str, int]:
    """Trains, decodes and saves one baseline; returns its language and number of steps."""
    experiment, language, folder = one.experiment, one.language, one.folder
    training = experiment.training
    cache = experiment.data.corpus.build(folder / "data")
    parts = build(experiment, cache, make_mesh=lambda: mesh_for(training, devices))
    decoding, of = experiment.decoding, {"vocabulary": cache.vocabulary.fingerprint}
    try:
        trained = loop.train(
            parts.program, training, folder, parts.stream, evaluators=[parts.dev_chrf()],
            note={"language": language, **of}, progress=functools.partial(report, language),
        )  # fmt: skip
    except BadStep as error:
        raise BadStep(f"bilingual model {language}: {error}") from error

    def hypotheses(sources: list[str], directions: list[str]) -> list[dict[str, str]]:
        numbers = [cache.directions.index(each) for each in directions]
        model = parts.ready(trained.params, decoding, parts.layout())
        found = translations(model, sources, directions=numbers, on_cut=lambda *_: None)
        return [{"hypothesis": each.texts[0]} for each in found]

    pairs = Portion("test", test_sentences=decoding.test_sentences).pairs(cache)
    made_by = {**decoding.search(), "step": trained.note["best_step"], **of}
    decode_to_files(hypotheses, one.decodes, "test", pairs, made_by)
    step = trained.note["step"]
    if one.result:
        return language, step
    # The evaluation of the last step ends an incomplete period.
    rule, whole = training.early_stopping, step % training.dev_period == 0
    result = {
        "identity": dict(one.identity),
        "translated": decoding.translated(),
        "parameters": sum(x.size for x in jax.tree.leaves(trained.params)),
        "note": trained.note,
        # Signs of convergence: dev ended the training, and the last quarter raised it little.
        "stopped_early": whole and rule is not None and rule.stopped(trained.note) is not None,
        "gain_last_quarter": gain_last_quarter(read_metrics(folder), step),
        "epochs": parts.stream.epochs(step),
    }
    write_json(folder / "result.json", result, indent=1)
    return language, step


def gain_last_quarter(rows: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Returns by how many points of dev chrF the last quarter of the steps raised the best."""
    scores = [(row["step"], row["dev/chrf"]) for row in rows if "dev/chrf" in row]
    early = [score for step, score in scores if step <= 0.75 * steps]
    return max(score for _, score in scores) - max(early, default=0.0)


# Raise when a change of code changes what a baseline becomes.
FORMAT = 9

# Corpus settings that a recipe decides; all others are the multilingual corpus's.
_VOCABULARIES = ("vocabulary_size", "target_vocabulary_size", "segmentations", "sampling_alpha")

# Settings of training that do not change the model, and so are not part of its hash.
_OPERATIONAL = ("checkpoint_period", "keep_checkpoints", "log_period", "tensorboard", "keep_period",
                "keep_best", "profile", "initial", "mesh", *BY_DIRECTION, "on_bad_step",
                "bad_steps", "parameter_rates")  # fmt: skip


def baselines(experiment: Experiment) -> dict[str, Baseline]:
    """Trains and decodes missing baselines; returns all by the `key_of` of their language pairs."""
    check_baselines(experiment)
    folder, cache = baselines_of(experiment).folder, open_corpus(experiment)
    check_held_out(cache)
    missing = [one for one in plans_of(experiment, cache).values() if not one.finished]
    if missing and isinstance(folder, SavedText):
        allowed = (
            f"a folder with the baselines of {', '.join(one.language for one in missing)}: a saved "
            "config names no folder to write to; give it on the command line "
            "(--gin.experiment.Baselines.folder=...)"
        )
        raise SettingError("Baselines.folder", folder, allowed)
    if missing:
        check_output(missing[0].folder, f"Baselines.folder = {folder}")
        cores = len(available_cpus())
        workers = workers_for(jax.default_backend(), cores, distributed.is_distributed())
        train_all(missing, workers)
    return find_baselines(experiment, cache)


def find_baselines(experiment: Experiment, cache: Cache) -> dict[str, Baseline]:
    """Returns the finished baselines by the `key_of` of their pairs; trains nothing."""
    plans = plans_of(experiment, cache)
    if missing := [name for name, one in plans.items() if not one.finished]:
        remedy = command_of(experiment, "baselines")
        said = f"no bilingual baseline of {', '.join(missing)}: train what is missing with {remedy}"
        raise InputError(said)
    return plans


def check_baselines(experiment: Experiment) -> None:
    """Raises SettingError if a bilingual model cannot be made or stops by an unmeasured metric."""
    for one in map(baselines_of(experiment).of, LEVELS):
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
            for level in LEVELS
        )
        allowed = "set for this job; add: experiment.Experiment.baselines = "
        allowed += f"@experiment.Baselines(); {levels} (gin_configs/demo.gin has such lines)"
        raise SettingError("Experiment.baselines", None, allowed)
    return experiment.baselines


def plans_of(experiment: Experiment, cache: Cache) -> dict[str, Baseline]:
    """Returns the baseline, trained or not, of each pair of languages by its `key_of`."""
    levels = baselines_of(experiment)
    folder = Path(levels.folder or experiment.folder / "baselines")
    plans = {}
    for pair in cache.tested_pairs():
        language = key_of(pair)
        base = levels.of(experiment.data.levels.of(cache.size(pair, "train")))
        vocabularies = {name: getattr(base.data.corpus, name) for name in _VOCABULARIES}
        data = dataclasses.replace(
            base.data, data_dir=None, corpus=bilingual(cache, pair, **vocabularies),
            sampler=proportional, sample_by="examples", stream=Stream,
        )  # fmt: skip
        unset = dict.fromkeys(("profile", "initial", "parameter_rates", *BY_DIRECTION))
        training = dataclasses.replace(base.training, **unset)
        more = {"decoding": experiment.decoding, "baselines": None}
        one = dataclasses.replace(base, data=data, training=training, **more)
        about = _identity(one, cache, pair)
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        one = dataclasses.replace(one, model_dir=str(folder / f"{language}.{name}"))
        plans[language] = Baseline(language, one, about)
    return plans


def _identity(one: Experiment, cache: Cache, pair: str) -> dict[str, Any]:
    training = identity(one.training)
    corpus = one.data.corpus
    return {
        "format": FORMAT,
        "language": key_of(pair),
        # Only the text counts, not its place in the multilingual corpus.
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
        # Greedy translations of dev end the training, so the search for test sets decides no model.
        "longest": [one.decoding.max_source_length, one.decoding.max_target_length],
    }


def workers_for(platform: str, cores: int, is_distributed: bool) -> int:
    """Returns the number of worker processes, one per CPU core, or 0 to train in this process."""
    # Processes cannot share a TPU, and on a GPU each would take most of the memory. In a job of
    # several processes, the others wait for this one, and a program for all devices for them.
    return cores if platform == "cpu" or is_distributed else 0
