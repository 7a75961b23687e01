"""`m4 translate`: a trained model that answers line by line."""

import sys

from m4.data.preprocess import split_direction
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.translate import Translator
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.jobs.corpus import open_vocabulary
from m4.parallel import distributed


def translator(experiment: Experiment) -> Translator:
    """The trained model, ready to translate; reads the vocabulary and parameters only.

    It is sharded over the experiment's mesh. Where these devices cannot make that mesh, it is on
    the first one, and a line on stderr says so and why.
    """
    folder = prepare.run_folder(experiment)
    cache = open_vocabulary(experiment)
    model = prepare.model_for(experiment, cache)
    try:
        layout = prepare.decoding_layout(experiment, model, cache.directions)
    except ValueError as error:
        why = distributed.first_line(error)
        print(f"m4 translate: on the first device alone: {why}", file=sys.stderr)
        layout = None
    params, _, _ = restore_params(model, folder / "checkpoints", None, cache.vocabulary, layout)
    return Translator(
        model,
        params,
        cache.vocabulary,
        experiment.decoding,
        languages=list(dict.fromkeys(split_direction(d)[1] for d in cache.directions)),
        layout=layout,
    )
