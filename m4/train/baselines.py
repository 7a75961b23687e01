"""Bilingual baselines: one small model a pair, by the same trainer, until dev stops rising.

Many small models train best side by side, one a core: a pool of processes, each on a core of its
own, takes one language after the other; compiled steps are kept on disk for all. (One vmapped
program of n models is slower than n single ones: docs/performance.md.) Finished models are kept
under the hash of everything that decides them, so another multilingual run on the same text reuses
them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from m4.parallel.cpus import available_cpus
from m4.progress import ProgressBar
from m4.storage.files import write_text
from m4.storage.metrics_log import read_metrics

# Raise when a change of code changes what a baseline becomes.
FORMAT = 4


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a bilingual model is built and trained: its size and how hard it is regularised.

    Attributes:
        width, heads, head_width, mlp_width, layers: as in `Transformer`; layers in each stack.
        vocabulary_size: pieces of the pair's own SentencePiece model, at most.
        dropout_rate, label_smoothing: regularisation.
        batch_rows: packed rows a step.
        peak, warmup_steps: of the learning rate, which falls with the inverse square root.
        matrix_rate: rate of the matrices within layers over that of all else (`optimizer.muon`).
        eta: of the parameters' average (`m4.train.average`), which is what is measured and kept.
        eval_period, patience, least_gain: dev chrF (greedy) is measured every `eval_period` steps;
            training ends when it has not risen by more than `least_gain` for `patience` times, and
            the best parameters are kept.
        max_steps: the most steps, for a pair that never stops rising.
    """

    width: int = 64
    heads: int = 2
    head_width: int = 32
    mlp_width: int = 256
    layers: int = 2
    vocabulary_size: int = 1000
    dropout_rate: float = 0.0
    label_smoothing: float = 0.1
    batch_rows: int = 8
    peak: float = 1.2e-2
    matrix_rate: float = 5 / 3
    warmup_steps: int = 200
    eta: float = 8.0
    eval_period: int = 750
    patience: int = 1
    least_gain: float = 0.75
    max_steps: int = 6000


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished baseline: its folder (with decodes/) and what is known about it."""

    language: str
    folder: Path
    result: dict[str, Any]


def train_baselines(
    folder: Path | str,
    corpus: Path | str,
    languages: Sequence[str],
    recipe_of: Callable[[str], Recipe],
    *,
    decoding: Mapping[str, Any],
    seed: int = 0,
    workers: int = 0,
    stage: Callable[[str, int, str], ProgressBar] = ProgressBar,
) -> dict[str, Finished]:
    """Trains, decodes and returns the baseline of every language; what is there is reused.

    Args:
        folder: where baselines are kept, `<language>.<hash>/` each.
        corpus: folder of the multilingual cache whose text is used.
        languages: the foreign side of each pair; both directions are one model's work.
        recipe_of: language -> how.
        decoding: beams, alpha, max lengths, batch rows of the test translations.
        workers: processes; 0: one a core.

    Raises:
        RuntimeError: a worker died.
    """
    from m4.data.cache.cache import Cache

    folder = Path(folder)
    cache = Cache(corpus)
    plans = {}
    for language in languages:
        plan = {
            "format": FORMAT,
            "language": language,
            # The text alone: where it stands in the parent's arrays does not matter.
            "text": {
                split: {name: about[name] for name in ("pairs", "sha256")}
                for split, about in cache.manifest["languages"][language].items()
            },
            "lengths": [cache.source_length, cache.target_length],
            "recipe": dataclasses.asdict(recipe_of(language)),
            "decoding": dict(decoding),
            "seed": seed,
        }
        name = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:12]
        plans[language] = {**plan, "folder": str(folder / f"{language}.{name}")}
    missing = {name: plan for name, plan in plans.items() if finished(plan) is None}
    if missing:
        _run(missing, str(corpus), workers or len(available_cpus()), stage)
    return {name: _expect(plan) for name, plan in plans.items()}


def finished(plan: Mapping[str, Any]) -> Finished | None:
    """The baseline of a plan if it is complete."""
    folder = Path(plan["folder"])
    if not (folder / "result.json").is_file():
        return None
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return Finished(plan["language"], folder, result)


def late_gain(rows: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Best dev chrF minus the best of the first three quarters of the steps, percent."""
    scores = [(row["step"], row["dev/chrf"]) for row in rows if "dev/chrf" in row]
    early = [score for step, score in scores if step <= 0.75 * steps]
    return max(score for _, score in scores) - max(early, default=0.0)


def _expect(plan: Mapping[str, Any]) -> Finished:
    found = finished(plan)
    assert found is not None, plan["folder"]
    return found


def _run(plans: Mapping[str, dict], corpus: str, workers: int, stage) -> None:
    """A pool of processes over the plans, the longest first. NotFinite: one of them diverged."""
    from m4.train.metric_window import NotFinite  # JAX, which workers import after `_start_worker`

    # spawn: a forked child would share the parent's JAX threads and hang.
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    cores = context.Queue()
    for core in available_cpus():
        cores.put(core)
    workers = min(workers, len(plans))
    steps = {name: plan["recipe"]["max_steps"] for name, plan in plans.items()}
    done = dict.fromkeys(plans, 0)
    complete: set[str] = set()
    texts: dict[str, str] = {}
    ordered = sorted(plans.values(), key=lambda p: -p["text"]["train"]["pairs"])
    with (
        stage("bilingual baselines", sum(steps.values()), "steps") as shown,
        ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start_worker, initargs=(cores, messages)
        ) as pool,
    ):
        waiting: set[Future] = set()
        try:
            languages = {pool.submit(train_one, plan, corpus): plan["language"] for plan in ordered}
            waiting = {*languages}
            while waiting:
                ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in ended:
                    try:
                        name, step = future.result()
                    except NotFinite as error:
                        raise NotFinite(f"bilingual model {languages[future]}: {error}") from error
                    complete.add(name)
                    done[name] = step
                    texts.pop(name, None)
                while (message := _next(messages)) is not None:
                    name, step, text = message
                    if name not in complete:
                        done[name], texts[name] = step, f"{name} {text}"
                shown.update(
                    sum(done.values()),
                    " · ".join([f"{len(complete)}/{len(plans)} models", *texts.values()]),
                    # What ended before its last step has no more to do.
                    total=sum(done[n] if n in complete else steps[n] for n in plans),
                )
        finally:
            for future in waiting:
                future.cancel()


def _next(messages) -> tuple[str, int, str] | None:
    try:
        return messages.get_nowait()
    except queue.Empty:
        return None


_messages: Any = None


def _start_worker(cores, messages) -> None:
    """Pins the process to one core before JAX counts them: one model then uses one core.

    Elsewhere than on Linux the processes share the cores as the system pleases.
    """
    global _messages
    _messages = messages
    if sys.platform != "linux":
        return
    with contextlib.suppress(queue.Empty):  # more workers than cores, if the user asked for that
        os.sched_setaffinity(0, {cores.get_nowait()})


def train_one(plan: Mapping[str, Any], corpus: str) -> tuple[str, int]:
    """Trains, decodes and writes one baseline; its language and steps. Runs in a worker."""
    import jax

    from m4.data.cache import cache as caches
    from m4.data.stream.stream import Stream
    from m4.eval.decoding.decode import decode
    from m4.eval.decoding.hypotheses import decode_to_files
    from m4.eval.decoding.settings import Decoding
    from m4.eval.decoding.testsets import split_pairs
    from m4.eval.scoring.dev_chrf import dev_chrf
    from m4.parallel.jax_setup import set_up
    from m4.parallel.mesh import make_mesh
    from m4.train.early_stopping import EarlyStopping
    from m4.train.loop import Evaluator, train

    folder, language = Path(plan["folder"]), plan["language"]
    set_up(folder.parent / "compilation_cache")
    recipe = Recipe(**plan["recipe"])
    parent = os.getppid()
    cache = caches.subset(
        caches.Cache(corpus), folder / "data", language, vocabulary_size=recipe.vocabulary_size
    )
    model = _model(recipe, cache)
    stream = Stream(cache, seed=plan["seed"], batch_rows=recipe.batch_rows)
    # Sources that are too long are told once, by the multilingual model's decoding.
    translate = functools.partial(
        decode, model, vocabulary=cache.vocabulary, on_cut=lambda *_: None
    )
    decoding = Decoding(**plan["decoding"])

    class Shown(ProgressBar):
        def update(self, done: int, text: str = "", total: int | None = None) -> None:
            if os.getppid() != parent:
                raise SystemExit("the parent process is gone")
            if _messages is not None:
                _messages.put((language, done, text))

    dev = dev_chrf(cache, translate, decoding)
    trained = train(
        folder,
        model,
        stream,
        _optimizer(recipe),
        make_mesh(),
        total_steps=recipe.max_steps,
        seed=plan["seed"],
        label_smoothing=recipe.label_smoothing,
        checkpoint_period=1000,
        keep=1,
        log_period=50,
        evaluators=[Evaluator(recipe.eval_period, dev)],
        early_stopping=EarlyStopping("dev/chrf", recipe.patience, recipe.least_gain),
        note={"language": language, "vocabulary": cache.vocabulary.fingerprint},
        tensorboard=False,
        stage=Shown(language, recipe.max_steps),
    )
    decode_to_files(
        lambda sources: translate(params=trained.params, sources=sources, settings=decoding),
        folder / "decodes",
        "test",
        split_pairs(cache, cache.directions, "test"),
        {
            **plan["decoding"],
            "step": trained.note["best_step"],
            "vocabulary": cache.vocabulary.fingerprint,
        },
    )
    result = {
        "plan": dict(plan),
        "parameters": sum(x.size for x in jax.tree.leaves(trained.params)),
        "note": trained.note,
        # Is it trained out? Whether dev ended it, and how much it rose in the last quarter.
        "ended_by_dev": trained.note["since_best"] >= recipe.patience
        and trained.note["step"] % recipe.eval_period == 0,  # the last step's is no whole period
        "late_gain": late_gain(read_metrics(folder), trained.note["step"]),
        "epochs": stream.epochs(trained.note["step"]),
    }
    write_text(folder / "result.json", json.dumps(result, indent=1))
    return language, trained.note["step"]


def _model(recipe: Recipe, cache: Any) -> Any:
    """The Transformer of a recipe for a language's m4.data.cache.cache.Cache."""
    from m4.model.transformer import Transformer

    return Transformer(
        # Not the exact size: models whose vocabularies differ by a few pieces share the program.
        vocab_size=-(-max(cache.target_vocabulary.size, recipe.vocabulary_size) // 8) * 8,
        width=recipe.width,
        heads=recipe.heads,
        head_width=recipe.head_width,
        mlp_width=recipe.mlp_width,
        encoder_layers=recipe.layers,
        decoder_layers=recipe.layers,
        dropout_rate=recipe.dropout_rate,
        absolute_positions=True,
    )


def _optimizer(recipe: Recipe) -> Callable[[int], Any]:
    """(total steps) -> the optimizer of a recipe."""
    from m4.train.average import averaged
    from m4.train.optimizer import muon, rsqrt

    schedule = functools.partial(
        rsqrt,
        peak=recipe.peak,
        warmup_steps=recipe.warmup_steps,
        hold_steps=2 * recipe.warmup_steps,
    )
    steps = functools.partial(muon, matrix_rate=recipe.matrix_rate, schedule=schedule)
    return functools.partial(averaged, optimizer=steps, eta=recipe.eta)
