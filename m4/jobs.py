"""The jobs behind the command line: train, baselines, decode, evaluate, report, translate, demo.

Each takes a `Setup`, which gin fills in. Jobs speak to each other through files in MODEL_DIR only:

    run.json config.gin operative_config.gin      whose folder it is and what made it
    data/                                         token cache, vocabulary, text (m4.data.cache)
    checkpoints/ metrics.jsonl tensorboard/       training
    decodes/test.<direction>.jsonl                translations of the test sets
    atlas.train.json decodes/atlas.test.json      who went to which expert (m4.train.routing_counts)
    baselines/<language>.<hash>/                  a bilingual model each, with its own decodes/
    compare/dense/                                the same model without experts, when asked for
    scores.jsonl deltas.jsonl delta_bleu.png delta_bleu.pdf report.html
"""

import datetime
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from m4.data.cache.cache import Cache
from m4.data.preprocess import language_of, split_direction
from m4.data.samplers.learned import Learned
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from m4.eval.decoding.hypotheses import decode_to_files
from m4.eval.decoding.inference_checkpoint import restore_params, trained_step
from m4.eval.decoding.routing_counter import routing_counter
from m4.eval.decoding.settings import Decoding as Decoding
from m4.eval.decoding.testsets import (
    ProgressDecoder,
    check_held_out,
    split_pairs,
)
from m4.eval.decoding.testsets import train_pairs as train_pairs_of
from m4.eval.decoding.translate import Translator
from m4.eval.report.page import Background
from m4.eval.report.results import Results
from m4.eval.scoring.delta import tables
from m4.eval.scoring.groups import ResourceLevels
from m4.eval.scoring.score import System, measure, score_rows, score_table, write_scores
from m4.experiment import Setup as Setup
from m4.experiment import build_model as build_model
from m4.experiment import console, corpus, model_folder, training_stream, translation_layout
from m4.experiment import prepare_process as prepare_process
from m4.parallel import distributed
from m4.progress import ProgressBar
from m4.storage import run_folder
from m4.storage.checkpoints import Checkpoints, latest_step
from m4.storage.files import write_text
from m4.storage.metrics_log import read_metrics
from m4.train import loop
from m4.train.baselines import Finished, Recipe, train_baselines
from m4.train.dev import dev_loss
from m4.train.sampling import LearnedSampling


def train(setup: Setup, *, dense: bool = False) -> None:
    """Trains the model (or, `dense`, the same without experts) from its latest checkpoint."""
    # First: what is not possible is told before the corpus is made.
    _check_learning(setup)
    mesh = setup.mesh()
    cache = corpus(setup)
    model = build_model(setup, cache, **({"moe": None} if dense else {}))
    stream = training_stream(setup, cache)
    groups: dict[str, list[str]] = {"high": [], "medium": [], "low": []}
    for direction in stream.directions:
        pairs = cache.size(language_of(direction), "train")
        groups[_levels(setup).of(pairs)].append(direction)
    folder = model_folder(setup, dense)
    latest = distributed.on_primary_then_broadcast(
        "checkpoints", lambda: latest_step(folder / "checkpoints")
    )
    if latest == setup.total_steps:
        return
    with ProgressBar("train dense" if dense else "train", setup.total_steps) as stage:
        setup.train(
            folder=folder,
            model=model,
            stream=stream,
            mesh=mesh,
            total_steps=setup.total_steps,
            seed=setup.seed,
            evaluators=[
                loop.Evaluator(
                    setup.dev_period, dev_loss(cache, stream, model, mesh, setup.dev_pairs)
                )
            ],
            sampling=_learned(setup, cache, stream),
            groups=groups,
            note={
                "vocabulary": cache.vocabulary.fingerprint,
                "corpus": cache.fingerprint,
                "train_pairs": train_pairs_of(cache),
                "manifest": cache.summary(),
            },
            stage=stage,
        )


def _levels(setup: Setup) -> ResourceLevels:
    return ResourceLevels(setup.high, setup.low)


def _check_learning(setup: Setup) -> None:
    """ValueError: a sampler that learns from evaluations, of which training makes none in time."""
    if isinstance(setup.sampler, Learned) and setup.dev_period >= setup.total_steps:
        raise ValueError(
            f"jobs.Setup.sampler = @learned.Learned() never learns: jobs.Setup.dev_period = "
            f"{setup.dev_period} must be less than TRAIN_STEPS = {setup.total_steps}"
        )


def _learned(setup: Setup, cache: Cache, stream: Stream) -> LearnedSampling | None:
    """Where the sampler learns: what joins it to the stream."""
    if not isinstance(setup.sampler, Learned):
        return None
    start = setup.sampler(mixture.sizes(cache, setup.sample_by))
    unit = mixture.units(cache, setup.sample_by)
    return LearnedSampling(
        setup.sampler,
        start,
        lambda rates: mixture.pair_rates(rates, unit),
        stream,
        {f"jobs.Setup.{name}": getattr(setup, name) for name in ("dev_period", "dev_pairs")},
    )


def baselines(setup: Setup) -> dict[str, Finished]:
    """Trains the bilingual models that are not there yet."""
    recipes = _recipes(setup)
    cache = corpus(setup)
    check_held_out(cache)

    def recipe_of(language: str) -> Recipe:
        return recipes[_levels(setup).of(cache.size(language, "train"))]

    return train_baselines(
        setup.baselines_dir or setup.folder / "baselines",
        cache.folder,
        cache.languages(),
        recipe_of,
        decoding=setup.decoding.search(),
        seed=setup.seed,
    )


def _recipes(setup: Setup) -> Mapping[str, Recipe]:
    if setup.baselines is None:
        raise ValueError("no bilingual baselines: jobs.Setup.baselines is not set in the config")
    if missing := {"high", "medium", "low"} - set(setup.baselines):
        raise ValueError(f"jobs.Setup.baselines has no recipe for {', '.join(sorted(missing))}")
    return setup.baselines


def decode_test(setup: Setup, *, dense: bool = False, split: str = "test") -> Path:
    """Translates the test sets of all directions; returns the folder of the hypotheses.

    Several processes search together; the first one writes.
    """
    cache = corpus(setup)
    model = build_model(setup, cache, **({"moe": None} if dense else {}))
    folder = model_folder(setup, dense)
    layout = translation_layout(setup, model, cache.directions)
    latest = distributed.on_primary_then_broadcast(
        "checkpoints", lambda: latest_step(folder / "checkpoints")
    )
    params, step, _ = restore_params(
        model, folder / "checkpoints", latest, cache.vocabulary, layout
    )
    directions = [d for d in cache.directions if cache.size(language_of(d), split)]
    pairs = split_pairs(cache, directions, split)
    settings = setup.decoding.search()
    made_by = {**settings, "step": step, "vocabulary": cache.vocabulary.fingerprint}
    counter = routing_counter(cache, model, params, folder / "decodes", split, made_by, layout)
    name = "decode dense" if dense else "decode test"
    with ProgressBar(name, sum(map(len, pairs.values())), "sentences") as stage:
        translate = ProgressDecoder(
            stage, model, params, cache.vocabulary, setup.decoding, counter, layout
        )
        decode_to_files(
            translate, folder / "decodes", split, pairs, made_by, starting=translate.starting
        )
        stage.update(stage.total)
    translate.warn_of_cut(name)
    return folder / "decodes"


def report(
    setup: Setup, *, dense: bool = False, save_config: Callable[[], None] = lambda: None
) -> Results:
    """Scores everything that is decoded against the bilingual baselines; writes and prints it.

    save_config: writes operative_config.gin, which the report shows.
    """
    cache = corpus(setup)
    systems = [_system(setup, cache, False)]
    if dense:
        systems.append(_system(setup, cache, True))
    curves = {system.name: read_metrics(system.decodes.parent) for system in systems}
    wanted = ("nll", "nll/high", "nll/medium", "nll/low")  # not every level has languages
    recorded = [row for rows in curves.values() for row in rows]
    found = baselines(setup) if setup.baselines is not None else {}
    systems += _bilingual(setup, found)
    shares, epochs = _seen(setup, cache)
    save_config()
    written = setup.report(
        folder=setup.folder,
        systems=systems,
        metrics=setup.decoding.metrics,
        train_pairs=train_pairs_of(cache),
        subsets={name: cache.subsets(name, "test") for name in cache.languages()},
        background=Background(
            corpus=setup.about,
            facts=_facts(setup, cache, found),
            configs={"multilingual": setup.folder / "operative_config.gin"},
            curves=curves,
            curve_keys=[key for key in wanted if any(key in row for row in recorded)],
            sampling=shares,
            epochs=epochs,
        ),
        levels=_levels(setup),
    )
    terminal = console()
    for table in tables(written.rows, written.averages, terminal.width):
        terminal.print(table)
    for path in (written.html, written.png, written.pdf, written.scores):
        terminal.print(str(path), highlight=False, soft_wrap=True)
    terminal.print(str(setup.folder / "operative_config.gin"), highlight=False, soft_wrap=True)
    return written


def _seen(setup: Setup, cache: Cache) -> tuple[dict[str, float], dict[str, float]]:
    """(share of the pairs, epochs) by language, of what the model was trained on."""
    store = Checkpoints(setup.folder / "checkpoints", read_only=True)
    try:
        seen = store.note(store.latest).get("seen") if store.latest is not None else None
    finally:
        store.close()
    if seen is None or seen["from_step"]:  # trained before this was counted
        return {}, {}
    total = sum(count["pairs"] for count in seen["languages"].values())
    shares = {name: count["pairs"] / total for name, count in seen["languages"].items()}
    epochs: dict[str, float] = {}
    for direction, count in seen["directions"].items():  # a pair is seen in each of its directions
        language = language_of(direction)
        times = count["pairs"] / cache.size(language, "train")
        epochs[language] = max(times, epochs.get(language, 0.0))
    return shares, epochs


def demo(
    setup: Setup, *, dense: bool = False, save_config: Callable[[], None] = lambda: None
) -> Results:
    """The whole road: corpus, training, baselines, decoding, scores, ΔBLEU and its picture."""
    # What the baselines need is told before the training.
    _recipes(setup)
    check_held_out(corpus(setup))
    train(setup)
    if dense:
        train(setup, dense=True)
    baselines(setup)
    decode_test(setup)
    if dense:
        decode_test(setup, dense=True)
    return report(setup, dense=dense, save_config=save_config)


def translator(setup: Setup) -> Translator:
    """The trained model, ready to translate; reads the vocabulary and parameters only.

    It lies over the config's mesh. Where these devices cannot have that mesh, it is on the first
    one, and a line on stderr says so and why.
    """
    cache = Cache(setup.folder / "data", setup.mixture)
    model = build_model(setup, cache)
    try:
        layout = translation_layout(setup, model, cache.directions)
    except ValueError as error:
        why = distributed.first_line(error)  # gin adds where it was called
        print(f"m4 translate: on the first device alone: {why}", file=sys.stderr)
        layout = None
    params, _, _ = restore_params(
        model, setup.folder / "checkpoints", None, cache.vocabulary, layout
    )
    return Translator(
        model,
        params,
        cache.vocabulary,
        setup.decoding,
        languages=list(dict.fromkeys(split_direction(d)[1] for d in cache.directions)),
        layout=layout,
    )


def evaluate(setup: Setup, *, dense: bool = False) -> Path:
    """Scores the translations of the test sets (made first where they are missing).

    Writes scores.jsonl with every system that is decoded: the model, the dense one when asked
    for, bilingual baselines where they are finished, and the copy baseline. Several processes
    translate together; scores are the first one's work.
    """
    decode_test(setup)
    if dense:
        decode_test(setup, dense=True)
    path = setup.folder / "scores.jsonl"
    distributed.on_primary_then_broadcast("scores", lambda: _scored(setup, path, dense))
    return path


def _scored(setup: Setup, path: Path, dense: bool) -> None:
    cache = corpus(setup)
    systems = [_system(setup, cache, False)] + ([_system(setup, cache, True)] if dense else [])
    gathered = setup.folder / "decodes" / "bilingual"
    if gathered.is_dir():
        systems.append(System("bilingual", gathered))
    rows = score_rows(
        measure(systems, setup.decoding.metrics),
        train_pairs_of(cache),
        {name: cache.subsets(name, "test") for name in cache.languages()},
    )
    write_scores(path, rows)
    terminal = console()
    terminal.print(score_table(rows))
    terminal.print(str(path), highlight=False, soft_wrap=True)


def _system(setup: Setup, cache: Cache, dense: bool) -> System:
    model = build_model(setup, cache, **({"moe": None} if dense else {}))
    folder = model_folder(setup, dense)
    step = trained_step(model, folder / "checkpoints", cache.vocabulary)
    return System(
        "moe" if model.moe is not None else "dense",
        folder / "decodes",
        config=str(setup.folder / "operative_config.gin"),
        checkpoint_step=step,
    )


def _bilingual(setup: Setup, found: Mapping[str, Finished]) -> list[System]:
    """The bilingual models as one system: their hypotheses gathered in one folder."""
    if not found:
        return []
    gathered = setup.folder / "decodes" / "bilingual"
    gathered.mkdir(parents=True, exist_ok=True)
    configs, steps = {}, {}
    for baseline in found.values():
        for path in sorted((baseline.folder / "decodes").glob("test.*.jsonl")):
            write_text(gathered / path.name, path.read_text(encoding="utf-8"))
            direction = path.name.split(".")[1]
            configs[direction] = str(baseline.folder / "result.json")
            steps[direction] = baseline.result["note"]["best_step"]
    return [System("bilingual", gathered, config=configs, checkpoint_step=steps)]


def _facts(setup: Setup, cache: Cache, found: Mapping[str, Finished]) -> dict[str, str]:
    about = run_folder.read(setup.folder)
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": about["machine"],
        "versions": ", ".join(f"{k} {v}" for k, v in about["versions"].items()),
        "steps": str(setup.total_steps),
        "seed": str(setup.seed),
        "corpus": f"{cache.fingerprint[:16]}, {json.dumps(cache.manifest['identity']['source'])}",
    }
    if found:
        latest = max(found.values(), key=lambda one: one.result["late_gain"])
        cut = [one.language for one in found.values() if not one.result["ended_by_dev"]]
        facts["bilingual models"] = (
            "one a language pair (both directions), trained until dev chrF stopped rising"
            + (f" (cut off before: {', '.join(cut)})" if cut else "")
            + "; in the last quarter of the steps it rose by at most "
            f"{latest.result['late_gain']:.1f} ({latest.language})"
        )
    return facts
