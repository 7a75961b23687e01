"""`m4 eval --zero_shot`: directions without training pairs, compared with a pivot via English.

Directions that only the mixture any_to_any made count among them, as they lack test sentences.
"""

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.directions import is_held_out, pair_of, split_direction
from m4.data.directions import zero_shot_directions as untrained
from m4.data.sources import SPLITS
from m4.data.splits import text_hash
from m4.data.testsets import directions_for
from m4.eval.decoding.hypotheses import steps_of
from m4.eval.decoding.testsets import Portion, pair_sizes, train_pairs
from m4.eval.decoding.translate import check_language
from m4.eval.report.results import Background, write_results
from m4.eval.scoring.score import read_scores
from m4.experiment import Experiment
from m4.jobs.decoding import testsets
from m4.jobs.decoding.evaluate import system, system_name
from m4.jobs.decoding.report import show
from m4.parallel import distributed
from m4.settings import InputError

PIVOT = "en"
ZERO_SHOT, PIVOTED = "zero_shot", "pivot"


def evaluate_zero_shot(
    experiment: Experiment, asked: str = "all", *, split: str = "test", step: int | None = None,
    sentences: int | None = None,
) -> None:  # fmt: skip
    """Translates untrained directions directly and through English, and scores both.

    The report in `zero_shot/` of the run, a trial or a step (`zero_shot.flores/` for a separate
    test set) has the differences from the pivot. `asked` is "all", the size of a fixed sample, or
    directions such as "fr-wo,wo-fr". Raises InputError if a language is unknown, or a direction is
    trained or has no references.
    """
    found = testsets.trained_step(experiment.folder, step)
    cache = testsets.open_for(experiment, split)
    most = experiment.decoding.test_sentences
    directions = chosen(experiment, cache, Portion(split, sentences, test_sentences=most), asked)
    portion = Portion(split, sentences, tuple(directions), most)
    if build(experiment, cache).model.by_task:
        raise InputError("--zero_shot: the experts of this model depend on the direction, and "
                         f"{directions[0]} has none")  # fmt: skip
    decodes = testsets.decodes_folder(experiment, step=step)
    decoder = testsets.PortionDecoder(experiment, portion)
    decoder.decode(found, decodes / ZERO_SHOT)
    known = {*cache.directions}
    pivoted = any({*testsets.halves(direction, PIVOT)} <= known for direction in directions)
    if pivoted:
        decoder.decode(found, decodes / PIVOTED, PIVOT)

    def report() -> None:
        place = testsets.scores_folder(experiment, step)
        more = "" if portion.name == "test" else f".{portion.name}"
        names = (ZERO_SHOT, PIVOTED)[: 1 + pivoted]
        systems = [system(experiment, name, decodes / name, steps_of(decodes / name, portion.name))
                   for name in names]  # fmt: skip
        ours, path = system_name(build(experiment, cache).model), place / f"scores{more}.jsonl"
        trained = [row for row in (read_scores(path) if path.is_file() else [])
                   if row["direction"] in cache.directions and row["system"] == ours]  # fmt: skip
        pairs = pair_sizes(train_pairs(cache), portion.directions)
        facts = {
            "pivot": f"two passes of the same model, through {PIVOT}",
            "training pairs": "pivoted ones, or the smaller of both languages' with English",
        }
        title, folder = "Directions without training pairs", place / f"{ZERO_SHOT}{more}"
        background = Background(title=title, facts=facts, trained=trained)
        marks = testsets.subsets(experiment, cache, portion, ZERO_SHOT)
        given = folder, systems, experiment.decoding.metrics, pairs, marks, background
        about = {"split": portion.name, "levels": experiment.data.levels}
        baseline = PIVOTED if pivoted else None
        written = write_results(*given, baseline=baseline, directions=portion.directions, **about)
        show(written, experiment.data.levels)

    distributed.on_primary_then_broadcast("the report", report)


def chosen(experiment: Experiment, cache: Cache, portion: Portion, asked: str) -> list[str]:
    """Returns the requested directions, all of which have references."""
    every, split, tested = untrained(cache.directions), portion.split, cache.tested_pairs()
    every += [each for each in cache.directions
              if is_held_out(each) and pair_of(each) not in tested]  # fmt: skip
    named = asked.split(",") if "-" in asked else []
    if not named and asked != "all" and not (asked.isdecimal() and int(asked)):
        raise InputError(f"--zero_shot={asked}: must be all, a number of directions above 0, or "
                         "directions as fr-wo,wo-fr")  # fmt: skip
    sides = zip(*map(split_direction, cache.directions), strict=True)
    sources, targets = (sorted(dict.fromkeys(side)) for side in sides)
    for direction in named:
        source, target = split_direction(direction)
        if source not in sources:
            raise InputError(f"--zero_shot={direction}: this model does not translate from "
                             f"{source}; it knows: {', '.join(sources)}")  # fmt: skip
        check_language(target, targets)
        if direction not in every:
            raise InputError(f"--zero_shot={direction}: has training pairs; m4 eval scores it")
    if not every:
        raise InputError("--zero_shot: the run is trained on all directions of its languages")
    if split in SPLITS:
        there = portion._replace(directions=tuple(named or every)).pairs(cache)
    else:
        there = directions_for(split, experiment.testsets[split], named or every)
    testsets.say_lacking(split, named or every, there, refused=bool(named) or not there)
    found = list(there)
    return found if named or asked == "all" else sorted(found, key=text_hash)[: int(asked)]
