"""`m4 translate`: a trained model that answers line by line."""

from m4.data.preprocess import split_direction
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.translate import Translator
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.corpus import open_vocabulary


def translator(experiment: Experiment) -> Translator:
    """The trained model, ready to translate; reads the vocabulary and parameters only.

    It is sharded over the experiment's mesh. Where these devices cannot make that mesh, it is on
    the first one, and a line on stderr says so and why.
    """
    folder = prepare.run_folder(experiment)
    cache = open_vocabulary(experiment)
    model = prepare.model_for(experiment, cache)
    layout = prepare.layout_or_first_device(experiment, model, cache.directions, "m4 translate")
    params, _, _ = restore_params(model, folder / "checkpoints", None, cache.vocabulary, layout)
    return Translator(
        model,
        params,
        cache.vocabulary,
        experiment.decoding,
        languages=list(dict.fromkeys(split_direction(d)[1] for d in cache.directions)),
        layout=layout,
    )
