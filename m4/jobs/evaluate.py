"""`m4 eval`: scores of the test sets, translated first if needed."""

from pathlib import Path

from m4.data.cache.cache import Cache
from m4.eval.decoding.inference_checkpoint import trained_step
from m4.eval.decoding.testsets import train_pairs
from m4.eval.scoring.score import System, measure, score_rows, score_table, write_scores
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.corpus import open_corpus, test_sets
from m4.jobs.decode import decode
from m4.parallel import distributed


def evaluate(experiment: Experiment, *, dense: bool = False) -> Path:
    """Scores the translations of the test sets; returns the path of scores.jsonl.

    Its systems: the model, the dense one when asked for, bilingual baselines where they are
    gathered, and the copy baseline. Several processes translate together; the primary scores.
    """
    decode(experiment)
    if dense:
        decode(experiment, dense=True)
    path = prepare.run_folder(experiment) / "scores.jsonl"
    distributed.on_primary_then_broadcast("scores", lambda: _score(experiment, path, dense))
    return path


def _score(experiment: Experiment, path: Path, dense: bool) -> None:
    cache = open_corpus(experiment, test_sets)
    systems = [system_of(experiment, cache)]
    if dense:
        systems.append(system_of(experiment, cache, dense=True))
    gathered = prepare.run_folder(experiment) / "decodes" / "bilingual"
    if gathered.is_dir():
        systems.append(System("bilingual", gathered))
    rows = score_rows(
        measure(systems, experiment.decoding.metrics),
        train_pairs(cache),
        {name: cache.subsets(name, "test") for name in cache.languages()},
    )
    write_scores(path, rows)
    terminal = prepare.console()
    terminal.print(score_table(rows))
    terminal.print(str(path), highlight=False, soft_wrap=True)


def system_of(experiment: Experiment, cache: Cache, *, dense: bool = False) -> System:
    """The trained model (or the dense one) as a system to score.

    Raises:
        ValueError: it is not trained, or was trained on another vocabulary.
    """
    folder = prepare.model_folder(experiment, dense)
    model = prepare.model_for(experiment.dense() if dense else experiment, cache)
    step = trained_step(model, folder / "checkpoints", cache.vocabulary)
    return System(
        "dense" if model.moe is None else "moe",
        folder / "decodes",
        config=str(prepare.run_folder(experiment) / "operative_config.gin"),
        checkpoint_step=step,
    )
