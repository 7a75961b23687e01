"""One bilingual baseline: trained, decoded, written."""

import contextlib
import functools
import os
import queue
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from m4.experiment import Experiment
from m4.parallel.mesh import make_mesh
from m4.parallel.platform import signals
from m4.parallel.platform.jax_setup import set_up
from m4.parallel.platform.signals import end_with
from m4.progress import ProgressBar
from m4.storage.files import write_json
from m4.storage.metrics_log import read_metrics
from m4.train.trainer import Trained, Training

# (language, step, text): how far a model is.
Report = Callable[[str, int, str], None]


class _Worker:
    """What a worker process knows: where messages to its parent go."""

    messages: Any


def start_worker(parent: int, cores: Any, messages: Any, programs: str | None) -> None:
    """Ends with the parent, however that ends, and computes on one core: one CPU device, whatever
    devices the parent has or asks JAX for. programs: the parent's folder of compiled programs.

    Elsewhere than on Linux the processes share the cores as the system pleases.
    """
    end_with(parent)
    # Ctrl-C reaches the parent too, which ends its workers by SIGTERM (`baselines`).
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.watch()
    _Worker.messages = messages
    # A TPU is the parent's, of a GPU's memory it has most, and fake devices would share the core.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    set_up(programs)
    if sys.platform == "linux":
        with contextlib.suppress(queue.Empty):  # more workers than cores, if the user asked for it
            os.sched_setaffinity(0, {cores.get_nowait()})


def train_in_worker(experiment: Experiment, identity: Mapping[str, Any]) -> tuple[str, int]:
    """`train_one` in a process of the pool; SIGTERM saves the step and raises Interrupted."""

    def report(*message: Any) -> None:
        _Worker.messages.put(message)

    before = signals.install()
    try:
        signals.check()
        return train_one(experiment, identity, jax.devices(), report)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Reported(ProgressBar):
    """A bar that is a report."""

    def __init__(self, name: str, total: int, report: Report):
        super().__init__(name, total)
        self._report = report

    def update(self, done: int, text: str = "", total: int | None = None) -> None:
        self._report(self.name, done, text)


def mesh_for(training: Training, devices: Sequence[Any]) -> Mesh:
    """Rows alone are split, over as many of the devices as divide them: the model is small."""
    rows = training.batch_size // training.grad_accum_steps
    count = max(n for n in range(1, len(devices) + 1) if rows % n == 0)
    return make_mesh(data=count, devices=devices[:count])


def train_one(
    experiment: Experiment, identity: Mapping[str, Any], devices: Sequence[Any], report: Report
) -> tuple[str, int]:
    """Trains, decodes and writes one baseline; its language and steps."""
    from m4.eval.decoding.decode import decode
    from m4.eval.decoding.hypotheses import decode_to_files
    from m4.eval.decoding.testsets import Portion
    from m4.eval.scoring.dev_chrf import dev_chrf
    from m4.jobs import prepare
    from m4.train.loop.run import Evaluator

    language = identity["language"]
    folder, training = Path(experiment.model_dir), experiment.training
    cache = experiment.data.corpus.build(folder / "data")
    model = prepare.model_for(experiment, cache)
    stream = prepare.training_stream(experiment, cache)
    mesh = mesh_for(training, devices)
    trainer = prepare.trainer_of(experiment, model, stream.directions, mesh, stream.shapes)
    # Sources that are too long are reported once, by the multilingual model's decoding.
    translate = functools.partial(
        decode,
        model,
        vocabulary=cache.vocabulary,
        on_cut=lambda *_: None,
        layout=trainer.layout(),
    )
    decoding = experiment.decoding
    dev = dev_chrf(cache, translate, decoding)
    trained = trainer.run(
        folder,
        stream,
        evaluators=[Evaluator(training.dev_period, dev)],
        note={"language": language, "vocabulary": cache.vocabulary.fingerprint},
        progress=_Reported(language, training.total_steps, report),
    )

    def hypotheses(sources: list[str]) -> list[dict[str, str]]:
        found = translate(params=trained.params, sources=sources, settings=decoding)
        return [{"hypothesis": each} for each in found]

    decode_to_files(
        hypotheses,
        folder / "decodes",
        "test",
        Portion("test", test_sentences=decoding.test_sentences).pairs(cache),
        {
            **decoding.search(),
            "step": trained.note["best_step"],
            "vocabulary": cache.vocabulary.fingerprint,
        },
    )
    step = trained.note["step"]
    result = {
        "identity": dict(identity),
        "translated": decoding.translated(),
        **_outcome(experiment, trained, stream.epochs(step)),
    }
    write_json(folder / "result.json", result, indent=1)
    return language, step


def _outcome(
    experiment: Experiment, trained: Trained, epochs: Mapping[str, float]
) -> dict[str, Any]:
    """What result.json says of the training."""
    rows = read_metrics(Path(experiment.model_dir))
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(trained.params)),
        "note": trained.note,
        # Is it trained out? Whether dev ended it, and how much it rose in the last quarter.
        "stopped_early": _stopped_early(experiment.training, trained.note),
        "gain_last_quarter": gain_last_quarter(rows, trained.note["step"]),
        "epochs": epochs,
    }


def _stopped_early(training: Training, note: Mapping[str, Any]) -> bool:
    """Whether dev ended it. The last step's evaluation closes no whole period."""
    rule = training.early_stopping
    stopped = rule is not None and note["since_best"] >= rule.patience
    return stopped and note["step"] % training.dev_period == 0


def gain_last_quarter(rows: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Best dev chrF minus the best of the first three quarters of the steps, percent."""
    scores = [(row["step"], row["dev/chrf"]) for row in rows if "dev/chrf" in row]
    early = [score for step, score in scores if step <= 0.75 * steps]
    return max(score for _, score in scores) - max(early, default=0.0)
