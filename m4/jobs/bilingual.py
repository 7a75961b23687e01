"""One bilingual baseline, in a worker process of `m4 baselines`."""

import contextlib
import functools
import json
import os
import queue
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.experiment import Experiment
from m4.progress import ProgressBar
from m4.storage.files import write_text
from m4.storage.metrics_log import read_metrics

_messages: Any = None


def start_worker(cores: Any, messages: Any) -> None:
    """Pins the process to one core before JAX counts them: one model then uses one core.

    Elsewhere than on Linux the processes share the cores as the system pleases.
    """
    global _messages
    _messages = messages
    if sys.platform != "linux":
        return
    with contextlib.suppress(queue.Empty):  # more workers than cores, if the user asked for that
        os.sched_setaffinity(0, {cores.get_nowait()})


class _Reported(ProgressBar):
    """A bar that is a message to the parent process."""

    _parent = 0

    def update(self, done: int, text: str = "", total: int | None = None) -> None:
        if os.getppid() != self._parent:
            raise SystemExit("the parent process has ended")
        if _messages is not None:
            _messages.put((self.name, done, text))


def train_one(
    language: str, experiment: Experiment, identity: Mapping[str, Any]
) -> tuple[str, int]:
    """Trains, decodes and writes one baseline; its language and steps."""
    import jax

    from m4.eval.decoding.decode import decode
    from m4.eval.decoding.hypotheses import decode_to_files
    from m4.eval.decoding.testsets import split_pairs
    from m4.eval.scoring.dev_chrf import dev_chrf
    from m4.jobs import prepare
    from m4.parallel.jax_setup import set_up
    from m4.train.run import Evaluator

    folder, training = Path(experiment.model_dir), experiment.training
    set_up(folder.parent / "compilation_cache")
    _Reported._parent = os.getppid()
    cache = experiment.data.corpus.build(folder / "data")
    model = prepare.model_for(experiment, cache)
    stream = prepare.training_stream(experiment, cache)
    # Sources that are too long are reported once, by the multilingual model's decoding.
    translate = functools.partial(
        decode, model, vocabulary=cache.vocabulary, on_cut=lambda *_: None
    )
    decoding = experiment.decoding
    dev = dev_chrf(cache, translate, decoding)
    trained = prepare.trainer_of(experiment, model, stream.directions, None, stream.shapes).run(
        folder,
        stream,
        evaluators=[Evaluator(training.dev_period, dev)],
        note={"language": language, "vocabulary": cache.vocabulary.fingerprint},
        progress=_Reported(language, training.total_steps),
    )
    decode_to_files(
        lambda sources: translate(params=trained.params, sources=sources, settings=decoding),
        folder / "decodes",
        "test",
        split_pairs(cache, cache.directions, "test"),
        {
            **decoding.search(),
            "step": trained.note["best_step"],
            "vocabulary": cache.vocabulary.fingerprint,
        },
    )
    step = trained.note["step"]
    rule = training.early_stopping
    result = {
        "identity": dict(identity),
        "parameters": sum(x.size for x in jax.tree.leaves(trained.params)),
        "note": trained.note,
        # Is it trained out? Whether dev ended it, and how much it rose in the last quarter.
        "stopped_early": rule is not None
        and trained.note["since_best"] >= rule.patience
        and step % training.dev_period == 0,  # the last step's is no whole period
        "gain_last_quarter": gain_last_quarter(read_metrics(folder), step),
        "epochs": stream.epochs(step),
    }
    write_text(folder / "result.json", json.dumps(result, indent=1))
    return language, step


def gain_last_quarter(rows: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Best dev chrF minus the best of the first three quarters of the steps, percent."""
    scores = [(row["step"], row["dev/chrf"]) for row in rows if "dev/chrf" in row]
    early = [score for step, score in scores if step <= 0.75 * steps]
    return max(score for _, score in scores) - max(early, default=0.0)
