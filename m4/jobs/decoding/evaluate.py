"""`m4 eval`: scores of the test sets, translated first if needed."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.directions import pair_of
from m4.data.sources import SPLITS
from m4.eval.decoding.hypotheses import check_hypotheses, other_search, steps_of
from m4.eval.decoding.testsets import Portion, train_pairs
from m4.eval.scoring.delta import BILINGUAL
from m4.eval.scoring.score import (
    Measured,
    System,
    document_rows,
    find_decodes,
    measure,
    read_decodes,
    score_rows,
    score_table,
    tried,
)
from m4.experiment import Experiment
from m4.jobs import streams
from m4.jobs.decoding.testsets import (
    command_of,
    decode,
    decodes_folder,
    open_for,
    scores_folder,
    subsets,
)
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.storage.files import write_jsonl
from m4.storage.local_copy import address_of


def evaluate(
    experiment: Experiment,
    *,
    split: str = "test",
    step: int | None = None,
    sentences: int | None = None,
) -> Path:
    """Scores the translations of a split; returns the path of the scores.

    They are in scores.jsonl, those of dev in scores.dev.jsonl, of 20 `sentences` per direction in
    scores.test20.jsonl, of a test set of its own in scores.<name>.jsonl, and those of a step or a
    trial next to its translations.

    The systems: the model, bilingual baselines where they are gathered, and the copy baseline.
    Several processes translate together; the primary scores.
    """
    distributed.on_primary_then_broadcast("metrics", lambda: [*tried(experiment.decoding.metrics)])
    decode(experiment, split=split, step=step, sentences=sentences)
    portion = Portion(split, sentences, test_sentences=experiment.decoding.test_sentences)
    name = "scores.jsonl" if portion.name == "test" else f"scores.{portion.name}.jsonl"
    path = scores_folder(experiment, step) / name

    def score() -> None:
        cache = open_for(experiment, split)
        model = system_of(experiment, cache, split=portion.name, step=step)
        _score(experiment, cache, model, portion, path)

    distributed.on_primary_then_broadcast("scores", score)
    return path


def _score(
    experiment: Experiment, cache: Cache, model: System, portion: Portion, path: Path
) -> None:
    systems = [model]
    gathered, search = decodes_folder(experiment) / "bilingual", experiment.decoding.search()
    if portion.name == "test":  # baselines translate no other one
        if gathered.is_dir():
            remedy = command_of(experiment, "report")
            check_hypotheses(gathered, "test", tested(cache), remedy)
            other = other_search(gathered, "test", tested(cache), search)
            if other is None:
                systems.append(System(BILINGUAL, gathered))
        else:
            there = (experiment.folder / "decodes" / BILINGUAL).is_dir()
            other = "not translated with this command's settings" if there else None
        if other is not None:
            again = [command_of(experiment, name) for name in ("baselines", "report")]
            print(f"bilingual baselines are left out: {other} ({' && '.join(again)})",
                  file=sys.stderr)  # fmt: skip
    measured = measure(systems, experiment.decoding.metrics, portion.name)
    rows = scored(experiment, cache, measured, portion)
    write_jsonl(path, rows)
    made = _task_metrics(experiment, cache, model, portion, path)
    if documents := document_rows(measured):
        made.append(path.with_name(path.name.replace("scores", "scores_by_document")))
        write_jsonl(made[-1], documents)
    terminal = streams.console()
    terminal.print(score_table(rows))
    streams.print_files(terminal, [path, *made])


def _task_metrics(
    experiment: Experiment, cache: Cache, system: System, portion: Portion, scores: Path
) -> list[Path]:
    """Writes the source's own metrics, a row a direction, next to the scores; returns the files."""
    source: Any = experiment.data.corpus.opened_source
    if portion.split not in SPLITS or not hasattr(source, "task_metrics"):
        return []
    rows, split = [], portion.split
    for direction, path in find_decodes(system.decodes, portion.name).items():
        if direction not in cache.directions:
            continue
        size = cache.size(pair_of(direction), split)
        texts = [row.hypothesis for row in read_decodes(path)]
        predictions = dict(zip(portion.chosen(range(size)), texts, strict=True))
        if found := source.task_metrics(direction, split, size, predictions):
            step = system.checkpoint_step
            step = step[direction] if isinstance(step, Mapping) else step
            of = {"direction": direction, "split": split, "checkpoint_step": step}
            rows.append({**of, **found})
    path = scores.with_name(scores.name.replace("scores", "task_metrics"))
    if not rows:
        print(f"no {path.name}: cleaning left out examples that the tasks' metrics need")
        path.unlink(missing_ok=True)
        return []
    write_jsonl(path, rows)
    return [path]


def scored(
    experiment: Experiment, cache: Cache, measured: Measured, portion: Portion
) -> list[dict[str, Any]]:
    """Returns the rows of scores.jsonl."""
    return score_rows(measured, train_pairs(cache), subsets(experiment, cache, portion))


def tested(cache: Cache) -> list[str]:
    """Returns the directions that have test sentences."""
    return [d for d in cache.directions if cache.size(pair_of(d), "test")]


def system_of(
    experiment: Experiment, cache: Cache, *, split: str = "test", step: int | None = None
) -> System:
    """Returns the trained model as a system to score.

    Its step is the one that made each translation: while the model trains, the latest is another.
    """
    decodes = decodes_folder(experiment, step)
    name = system_name(build(experiment, cache).model)
    return system(experiment, name, decodes, steps_of(decodes, split))


def system(experiment: Experiment, name: str, decodes: Path, steps: Mapping[str, int]) -> System:
    """Returns a model's translations as a system. steps: The checkpoint's, by direction."""
    config = address_of(scores_folder(experiment) / "operative_config.gin")
    return System(name, decodes, config=str(config), checkpoint_step=steps)


def system_name(model: Transformer) -> str:
    """Returns the name of a model in scores."""
    return "dense" if model.moe is None else "moe"
