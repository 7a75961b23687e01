"""The training of bilingual baselines, in a pool of processes or in this one.

On CPUs many small models train best next to each other: each process of the pool has one core and
takes one language after the other, and compiled steps are kept on disk for all. (One vmapped
program of n models is slower than n single ones: docs/decisions.md.) On an accelerator this
process trains them one after the other.
"""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from m4.build import build
from m4.eval.decoding.decode import translations
from m4.eval.decoding.hypotheses import decode_to_files, hypotheses_path
from m4.eval.decoding.testsets import Portion
from m4.experiment import Experiment
from m4.parallel.mesh import make_mesh
from m4.parallel.platform import signals
from m4.parallel.platform.hardware import available_cpus
from m4.parallel.platform.jax_setup import set_up
from m4.parallel.platform.signals import end_with
from m4.progress import ProgressBar
from m4.storage.files import read_json, write_json
from m4.storage.metrics_log import read_metrics
from m4.storage.records import count, flag, number, record
from m4.train import loop
from m4.train.bad_steps import BadStep
from m4.train.training import Training

_RESULT = record(
    {
        "note": record({"best_step": count, "step": count}),
        "stopped_early": flag,
        "gain_last_quarter": number,
    }
)

# (language, step, text): how far a model is.
Report = Callable[[str, int, str], None]


@dataclasses.dataclass(frozen=True)
class Baseline:
    """One bilingual baseline."""

    language: str  # `key_of` its pair of languages
    level: str  # its resource level
    experiment: Experiment  # The experiment of the baseline; its `model_dir` is `folder`.
    identity: Mapping[str, Any]  # everything that decides the model, as JSON

    @property
    def folder(self) -> Path:
        """Folder with the checkpoints, the translations (`decodes`) and result.json."""
        return self.experiment.folder

    def result(self) -> dict[str, Any] | None:
        """Returns the content of result.json, or None where the model is not trained yet."""
        path = self.folder / "result.json"
        if not path.is_file():
            return None
        return read_json(path, _RESULT, remedy=f"delete {self.folder} to train it again")

    def decodes(self) -> Path:
        """Folder of the translations with the experiment's decoding settings.

        It is decodes/ for those of the job that trained, and one within for each other.
        """
        own = (self.result() or {}).get("translated", {})
        return self.folder / "decodes" / self.experiment.decoding.trial(own)

    def finished(self) -> dict[str, Any] | None:
        """Returns `result` where the experiment's decoding settings have translated, too."""
        folder, corpus = self.decodes(), self.experiment.data.corpus
        paths = [hypotheses_path(folder, "test", direction)
                 for direction in corpus.directions()]  # fmt: skip
        whole = all(path.with_suffix(".json").is_file() for path in paths)
        return self.result() if whole else None


def train_all(missing: Sequence[Baseline], workers: int) -> None:
    """Trains and decodes baselines, the largest first; with 0 workers in this process."""
    ordered = sorted(missing, key=lambda one: -one.identity["text"]["train"]["pairs"])
    shown = Progress({one.language: one.experiment.training.total_steps for one in ordered})
    for one in ordered:
        if (trained := one.result()) is not None:  # its test sets alone are to be translated
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
            with _named(one.language):
                shown.finished(*train_one(one, jax.devices(), report))
            bar.update(*shown.line())


class Progress:
    """Steps of all models on one bar, whose total shrinks when a model ends early."""

    def __init__(self, steps: Mapping[str, int]) -> None:  # most steps of each model
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
        """Returns (steps done, text, total as far as is known) for a bar."""
        models = f"{len(self._ended)}/{len(self._most)} models"
        text = " · ".join([models, *self._texts.values()])
        return sum(self._done.values()), text, sum(self._most.values())


@contextlib.contextmanager
def _named(language: str) -> Iterator[None]:
    try:
        yield
    except BadStep as error:
        raise BadStep(f"bilingual model {language}: {error}") from error


# ------------------------------------------------------------------------------ pool of processes


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
    pool = ProcessPoolExecutor(
        min(workers, len(ordered)),
        mp_context=context,
        initializer=start_worker,
        initargs=(os.getpid(), cores, messages, programs),
    )
    with signals.held(), pool:
        waiting: set[Future] = set()
        try:
            languages = {pool.submit(train_in_worker, one): one.language for one in ordered}
            waiting = {*languages}
            while waiting:
                ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in ended:
                    with _named(languages[future]):
                        shown.finished(*future.result())
                with contextlib.suppress(queue.Empty):
                    while True:
                        shown.heard(*messages.get_nowait())
                bar.update(*shown.line())
        finally:
            # At a signal, or where one has failed, the others save their steps.
            for future in waiting:
                future.cancel()
            for worker in {*multiprocessing.active_children()} - others if waiting else ():
                worker.terminate()


_to_parent: Any = None  # in a worker process: the queue of its messages


def start_worker(parent: int, cores: Any, messages: Any, programs: str | None) -> None:
    """Prepares a process of the pool, which ends with its parent and computes on one CPU core."""
    end_with(parent)
    # Ctrl-C reaches the parent too, which ends its workers by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.watch()
    global _to_parent
    _to_parent = messages
    # A TPU is the parent's, it has most of a GPU's memory, and fake devices would share the core.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    set_up(programs)
    if sys.platform == "linux":
        with contextlib.suppress(queue.Empty):  # more workers than cores, if the user asked for it
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


# -------------------------------------------------------------------------------------- one model


def mesh_for(training: Training, devices: Sequence[Any]) -> Mesh:
    """Returns a mesh of as many of the devices as divide a batch's rows: the model is small."""
    rows = training.batch_size // training.grad_accum_steps
    count = max(n for n in range(1, len(devices) + 1) if rows % n == 0)
    return make_mesh(data=count, devices=devices[:count])


def train_one(one: Baseline, devices: Sequence[Any], report: Report) -> tuple[str, int]:
    """Trains, decodes and writes one baseline; returns its language and its steps."""
    experiment, language, folder = one.experiment, one.language, one.folder
    training = experiment.training
    cache = experiment.data.corpus.build(folder / "data")
    parts = build(experiment, cache, make_mesh=lambda: mesh_for(training, devices))
    decoding, of = experiment.decoding, {"vocabulary": cache.vocabulary.fingerprint}
    trained = loop.train(
        parts.program,
        training,
        folder,
        parts.stream,
        evaluators=[parts.dev_chrf()],
        note={"language": language, **of},
        progress=functools.partial(report, language),
    )

    def hypotheses(sources: list[str], directions: list[str]) -> list[dict[str, str]]:
        numbers = [cache.directions.index(each) for each in directions]
        model = parts.ready(trained.params, decoding, parts.layout())
        found = translations(model, sources, directions=numbers, on_cut=lambda *_: None)
        return [{"hypothesis": each.texts[0]} for each in found]

    decode_to_files(
        hypotheses,
        one.decodes(),
        "test",
        Portion("test", test_sentences=decoding.test_sentences).pairs(cache),
        {**decoding.search(), "step": trained.note["best_step"], **of},
    )
    step = trained.note["step"]
    if one.result() is not None:
        return language, step
    # The last step's evaluation closes no whole period.
    rule, whole = training.early_stopping, step % training.dev_period == 0
    result = {
        "identity": dict(one.identity),
        "translated": decoding.translated(),
        "parameters": sum(x.size for x in jax.tree.leaves(trained.params)),
        "note": trained.note,
        # Is it trained out? Whether dev ended it, and how much it rose in the last quarter.
        "stopped_early": whole and rule is not None and rule.stopped(trained.note) is not None,
        "gain_last_quarter": gain_last_quarter(read_metrics(folder), step),
        "epochs": parts.stream.epochs(step),
    }
    write_json(folder / "result.json", result, indent=1)
    return language, step


def gain_last_quarter(rows: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Returns the best dev chrF minus the best of the first three quarters of steps, percent."""
    scores = [(row["step"], row["dev/chrf"]) for row in rows if "dev/chrf" in row]
    early = [score for step, score in scores if step <= 0.75 * steps]
    return max(score for _, score in scores) - max(early, default=0.0)
