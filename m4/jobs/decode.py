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
from m4.storage.checkpoints import latest_step


def latest_trained(folder: Path) -> int:
    """The latest step of the model in a folder. InputError: it has none."""
    if (latest := latest_step(folder / "checkpoints")) is None:
        raise InputError(f"{folder}: no checkpoints; train first, or give another MODEL_DIR")
    return latest


def decode(experiment: Experiment, *, dense: bool = False, split: str = "test") -> Path:
    """Translates a split of all directions; returns the folder of the hypotheses.

    What is there and was made with the same settings is left as it is. Several processes search
    together; the primary writes.
    """
    folder = prepare.model_folder(experiment, dense)
    if dense:
        experiment = experiment.dense()
    prepare.check_decoding_sizes(experiment)
    latest = distributed.on_primary_then_broadcast("checkpoints", lambda: latest_trained(folder))
    cache = open_corpus(experiment, test_sets)
    model = prepare.model_for(experiment, cache)
    layout = prepare.decoding_layout(experiment, model, cache.directions)
    params, step, _ = restore_params(
        model, folder / "checkpoints", latest, cache.vocabulary, layout
    )
    directions = [d for d in cache.directions if cache.size(language_of(d), split)]
    pairs = split_pairs(cache, directions, split)
    settings = experiment.decoding.search()
    made_by = {**settings, "step": step, "vocabulary": cache.vocabulary.fingerprint}
    counter = routing_counter(cache, model, params, folder / "decodes", split, made_by, layout)
    name = "decode dense" if dense else f"decode {split}"
    with ProgressBar(name, sum(map(len, pairs.values())), "sentences") as bar:
        translate = ProgressDecoder(
            bar, model, params, cache.vocabulary, experiment.decoding, counter, layout
        )
        decode_to_files(
            translate, folder / "decodes", split, pairs, made_by, starting=translate.starting
        )
        bar.update(bar.total)
    translate.warn_of_cut(name)
    return folder / "decodes"
