"""A trained model that is ready to translate."""

from typing import Any, NamedTuple

from m4.build import build
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.translate import Translator
from m4.experiment import Experiment
from m4.jobs.corpus import open_vocabulary
from m4.parallel import distributed
from m4.storage.steps import digest


class ReadyModel(NamedTuple):
    """A trained model, ready to translate."""

    translator: Translator  # the model, its vocabulary and its settings
    made_by: dict[str, Any]  # everything that decides a translation, as JSON


def trained(experiment: Experiment, step: int | None = None, job: str = "m4 decode") -> ReadyModel:
    """Returns the model of a step, by default the latest; reads vocabulary and parameters only.

    It is sharded over the experiment's mesh. Where these devices cannot make that mesh, it is on
    the first one, and stderr has a line with the reason; with several processes it is an error.
    """
    folder = experiment.folder
    cache = open_vocabulary(experiment)
    parts = build(experiment, cache)
    model = parts.model
    together = distributed.is_distributed()
    layout = parts.layout() if together else parts.layout_or_first_device(job)
    params, found, _ = restore_params(model, folder / "checkpoints", step, cache.vocabulary, layout)
    translator = Translator(
        model,
        params,
        cache.vocabulary,
        experiment.decoding,
        layout=layout,
        normalise=experiment.data.corpus.cleaning.normalise,
        trained=cache.directions,
        factors=cache.length_factors,
    )
    made_by = {
        "step": found,
        # Of another run, or of a mean, the step may be the same.
        "checkpoint": digest(folder / "checkpoints", found),
        "vocabulary": cache.vocabulary.fingerprint,
    }
    made_by |= experiment.decoding.search()
    if cache.length_factors:
        made_by["length_factors"] = cache.length_factors
    return ReadyModel(translator, made_by)


def translator(experiment: Experiment) -> Translator:
    """Returns the latest model, for `m4 translate`."""
    return trained(experiment, job="m4 translate").translator
