"""`m4 decode`: the test sets of all directions, translated with the trained model."""

from pathlib import Path

from m4.data.preprocess import language_of
from m4.eval.decoding.hypotheses import decode_to_files
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.routing_counter import routing_counter
from m4.eval.decoding.testsets import ProgressDecoder, split_pairs
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.corpus import open_corpus, test_sets
from m4.parallel import distributed
from m4.progress import ProgressBar
from m4.settings import InputError
from m4.storage import remote
from m4.storage.steps import whole_step


def trained_step(folder: Path, step: int | None = None) -> int:
    """The step of the model in a folder, None: the last whole one. InputError: it has none, or not
    that."""
    found = whole_step(folder / "checkpoints", step, used=True)
    if found is None:
        raise InputError(
            f"{remote.remote_path(folder)}: no checkpoints; train first, or give another MODEL_DIR"
        )
    return found


def decodes_folder(folder: Path, step: int | None = None) -> Path:
    """Where the hypotheses of a model are: of the latest step, or of one that was asked for."""
    return folder / "decodes" if step is None else folder / "decodes" / str(step)


def decode(
    experiment: Experiment, *, dense: bool = False, split: str = "test", step: int | None = None
) -> Path:
    """Translates a split of all directions; returns the folder of the hypotheses.

    What is there and was made with the same settings is left as it is. Several processes search
    together; the primary writes.

    Args:
        split: "test" or "dev". step: of a checkpoint that is kept; None: the latest.

    Raises:
        ValueError: there is no such checkpoint.
    """
    folder = prepare.model_folder(experiment, dense)
    decodes = decodes_folder(folder, step)
    if dense:
        experiment = experiment.dense()
    prepare.check_decoding_sizes(experiment)
    found = distributed.on_primary_then_broadcast("checkpoints", lambda: trained_step(folder, step))
    cache = open_corpus(experiment, test_sets)
    model = prepare.model_for(experiment, cache)
    layout = prepare.decoding_layout(experiment, model, cache.directions)
    params, _, _ = restore_params(model, folder / "checkpoints", found, cache.vocabulary, layout)
    directions = [d for d in cache.directions if cache.size(language_of(d), split)]
    pairs = split_pairs(cache, directions, split)
    settings = experiment.decoding.search()
    made_by = {**settings, "step": found, "vocabulary": cache.vocabulary.fingerprint}
    counter = routing_counter(cache, model, params, decodes, split, made_by, layout)
    name = "decode dense" if dense else f"decode {split}"
    with ProgressBar(name, sum(map(len, pairs.values())), "sentences") as bar:
        translate = ProgressDecoder(
            bar, model, params, cache.vocabulary, experiment.decoding, counter, layout
        )
        decode_to_files(translate, decodes, split, pairs, made_by, starting=translate.starting)
        bar.update(bar.total)
    translate.warn_of_cut(name)
    return decodes
