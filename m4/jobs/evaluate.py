"""`m4 eval`: scores of the test sets, translated first if needed."""

from pathlib import Path

from m4.data.cache.cache import Cache
from m4.eval.decoding.inference_checkpoint import trained_step
from m4.eval.decoding.testsets import train_pairs
from m4.eval.scoring.score import System, measure, score_rows, score_table, write_scores
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.corpus import open_corpus, test_sets
from m4.jobs.decode import decode, decodes_folder
from m4.parallel import distributed


def evaluate(
    experiment: Experiment, *, dense: bool = False, split: str = "test", step: int | None = None
) -> Path:
    """Scores the translations of a split, by the latest checkpoint or the one of `step`; returns
    the path of the scores: scores.jsonl, of the split dev scores.dev.jsonl; of a step next to its
    translations.

    Its systems: the model, the dense one when asked for, bilingual baselines where they are
    gathered, and the copy baseline. Several processes translate together; the primary scores.
    """
    decode(experiment, split=split, step=step)
    if dense:
        decode(experiment, dense=True, split=split, step=step)
    folder = prepare.run_folder(experiment)
    folder = folder if step is None else decodes_folder(folder, step)
    path = folder / ("scores.jsonl" if split == "test" else f"scores.{split}.jsonl")
    distributed.on_primary_then_broadcast(
        "scores", lambda: _score(experiment, path, dense, split, step)
    )
    return path


def _score(experiment: Experiment, path: Path, dense: bool, split: str, step: int | None) -> None:
    cache = open_corpus(experiment, test_sets)
    systems = [system_of(experiment, cache, step=step)]
    if dense:
        systems.append(system_of(experiment, cache, dense=True, step=step))
    gathered = prepare.run_folder(experiment) / "decodes" / "bilingual"
    if gathered.is_dir() and split == "test":  # baselines translate no other one
        systems.append(System("bilingual", gathered))
    rows = score_rows(
        measure(systems, experiment.decoding.metrics, split),
        train_pairs(cache),
        {name: cache.subsets(name, split) for name in cache.languages()},
    )
    write_scores(path, rows)
    terminal = prepare.console()
    terminal.print(score_table(rows))
    terminal.print(str(path), highlight=False, soft_wrap=True)


def system_of(
    experiment: Experiment, cache: Cache, *, dense: bool = False, step: int | None = None
) -> System:
    """The trained model (or the dense one) as a system to score.

    Raises:
        ValueError: it is not trained, or was trained on another vocabulary.
    """
    folder = prepare.model_folder(experiment, dense)
    model = prepare.model_for(experiment.dense() if dense else experiment, cache)
    found = trained_step(model, folder / "checkpoints", cache.vocabulary, step)
    return System(
        "dense" if model.moe is None else "moe",
        decodes_folder(folder, step),
        config=str(prepare.run_folder(experiment) / "operative_config.gin"),
        checkpoint_step=found,
    )
