"""The one place that builds the parts of an experiment: `build(experiment, corpus)`.

Training, plans, dry runs, decoding and baselines call it. Without a corpus, the config gives the
sizes, so that checking a config is the same call.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from m4.data.cache.cache import Cache
from m4.data.directions import split_direction
from m4.data.preprocess import tag
from m4.data.samplers import kept_of
from m4.data.samplers.learned import ALIGNMENT, Learned
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from m4.eval.decoding.decode import translations
from m4.eval.decoding.testsets import split_pairs, train_pairs
from m4.eval.decoding.translate import Translator
from m4.eval.metrics.chrf import chrf
from m4.experiment import Decoding, Experiment, identity
from m4.model.flops import forward_flops, model_flops
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.parallel.mesh import Layout, axis_rules_context
from m4.settings import SettingError, first_line
from m4.train import program
from m4.train.early_stopping import EarlyStopping
from m4.train.loop import Evaluator
from m4.train.measuring.dev import dev_directions, dev_loss
from m4.train.measuring.step_clock import Flops, peak_flops
from m4.train.multitask.cosines import gradient_cosines
from m4.train.multitask.groups import Directions, check_groups
from m4.train.program import BatchShape, TrainProgram
from m4.train.sampling import LearnedSampling
from m4.train.training import BY_DIRECTION


def build(
    experiment: Experiment, corpus: Cache | None, *, languages: Sequence[str] | None = None,
    make_mesh: Callable[[], Mesh] | None = None,
) -> "Parts":  # fmt: skip
    """Returns the parts of an experiment, each of which is made on first use.

    Args:
        corpus: Corpus that decides the directions and the sizes of vocabularies. Defaults to the
            sizes that the config asks for, from which the model's sizes never differ.
        languages: Languages to assume without a corpus. Defaults to those of the config.
        make_mesh: Function that makes the mesh. Defaults to the config's, over all devices.
    """
    training, data = experiment.training, experiment.data
    if corpus is not None:
        pairs = corpus.sizes()
        levels: dict[str, list[str]] = {"high": [], "medium": [], "low": []}
        for name, size in pairs.items():
            levels[data.levels.of(size)].append(name)
        directions = Directions(corpus.directions, pairs, levels)
        sizes = {"vocab_size": corpus.target_vocabulary.size}
        if corpus.separate:
            sizes["source_vocab_size"] = corpus.source_vocabulary.size
    else:
        spec = data.corpus
        names = spec.directions(_expected_languages(experiment) if languages is None else languages)
        directions = Directions.assumed(names)
        sizes = {"vocab_size": spec.target_vocabulary_size or spec.vocabulary_size}
        if spec.target_vocabulary_size is not None:
            sizes["source_vocab_size"] = spec.vocabulary_size
    return Parts(experiment, directions, sizes, corpus, make_mesh or training.mesh)


def model_of(
    experiment: Experiment, sizes: Mapping[str, int], directions: int, **more: Any
) -> Transformer:
    """Returns the model for vocabularies of these sizes (vocab_size, source_vocab_size)."""
    multiple, corpus = experiment.vocabulary_multiple, experiment.data.corpus
    asked = {"vocab_size": corpus.target_vocabulary_size or corpus.vocabulary_size}
    # The size is at least that of the config: a vocabulary of little text may come out smaller by
    # chance, and models of one size share a compiled program.
    sizes = {name: max(size, asked.get(name, 0)) for name, size in sizes.items()}
    rounded = {name: -(-size // multiple) * multiple for name, size in sizes.items()}
    return experiment.model(**rounded, directions=directions, **more)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of an experiment."""

    experiment: Experiment
    # Directions in the order of the corpus, with their sizes and resource levels.
    directions: Directions
    _sizes: Mapping[str, int]  # sizes of the vocabularies, for `model_of`
    _corpus: Cache | None
    _make_mesh: Callable[[], Mesh]

    @functools.cached_property
    def model(self) -> Transformer:
        """The model, without parameters. Raises SettingError if it cannot be made."""
        grouping, tasks = self.experiment.tasks, dict[str, Any]()
        if grouping is not None:
            groups = check_groups(grouping, self.directions, "Experiment.tasks").values()
            of = {name: task for task, group in enumerate(groups) for name in group}
            tasks["tasks"] = [of[name] for name in self.directions.names]
        return model_of(self.experiment, self._sizes, len(self.directions.names), **tasks)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh. Raises SettingError if the devices cannot make it."""
        return self._make_mesh()

    @property
    def corpus(self) -> Cache:
        """The corpus, which `build` must have been given."""
        assert self._corpus is not None
        return self._corpus

    @functools.cached_property
    def stream(self) -> Stream:
        """The batches of training, drawn at the sampler's first rates."""
        training, data = self.experiment.training, self.experiment.data
        return mixture.make_stream(
            self.corpus, data.full_sampler, data.sample_by, training.total_steps, data.stream,
            seed=training.seed, batch_rows=training.batch_size,
            source_length=data.corpus.lengths["inputs"],
            target_length=data.corpus.lengths["targets"],
        )  # fmt: skip

    @property
    def batch_shape(self) -> BatchShape:
        """The shape of the batches."""
        lengths = self.experiment.data.corpus.lengths
        return self.experiment.training.batch_size, lengths["inputs"], lengths["targets"]

    @functools.cached_property
    def trained(self) -> Directions:
        """The trained directions, in the order of the stream, which may leave some out."""
        if self._corpus is None:
            return self.directions
        names = self.stream.directions
        if self.model.by_task and list(names) != list(self.directions.names):
            allowed = "a sampler with a rate for every direction, for a gate by task"
            raise SettingError("Data.sampler", self.experiment.data.sampler, allowed)
        inside = {level: [name for name in members if name in names]
                  for level, members in self.directions.levels.items()}  # fmt: skip
        return Directions(names, {name: self.directions.sizes[name] for name in names}, inside)

    @functools.cached_property
    def program(self) -> TrainProgram:
        """The training step. Raises SettingError for sizes that do not divide over the mesh."""
        return program.train_program(
            self.experiment.training, self.model, self.trained, self.mesh, self.batch_shape
        )

    @property
    def flops(self) -> Flops:
        """The model FLOPs of a training step, and the peak FLOP/s of the devices."""
        peak = math.inf  # only the primary process writes the utilisation
        if distributed.is_primary():
            peak = peak_flops([*self.mesh.devices.flat], self.model.dtype)
        return Flops(model_flops(forward_flops(self.model, *self.batch_shape)), peak)

    def layout(self) -> Layout | None:
        """Returns the model's layout in translation, or None on one device."""
        training, mesh = self.experiment.training, self.mesh
        with axis_rules_context(mesh, training.extra_axis_rules):
            program.check_model(mesh, self.model)
        if mesh.size == 1:
            return None
        # A decoding step has one position, so rules for "length" are left out.
        rules = [rule for rule in training.extra_axis_rules if rule[0] != "length"]
        return Layout(mesh, training.fsdp_axes, rules)

    def layout_or_first_device(self, job: str) -> Layout | None:
        """Returns `layout`, or None and a line on stderr if the mesh cannot be made."""
        try:
            return self.layout()
        except ValueError as error:
            why = first_line(error)
            print(f"{job}: on the first device alone: {why}", file=sys.stderr)
            return None

    def ready(self, params: Any, decoding: Decoding, layout: Layout | None) -> Translator:
        """Returns a translator: the model with parameters, under these settings."""
        corpus = self.corpus
        return Translator(
            self.model, params, corpus.vocabulary, decoding, layout, corpus.length_factors,
            normalise=self.experiment.data.corpus.cleaning.normalise, trained=corpus.directions,
        )  # fmt: skip

    def dev_chrf(self, limit: int | None = None) -> Evaluator:
        """Returns the evaluator of greedy translations of dev sentences by chrF, in percent.

        With little training data, dev loss rises early, so chrF picks the model instead.

        Args:
            limit: Number of sentences of each direction, from the first on. Defaults to all.
        """
        corpus, decoding = self.corpus, self.experiment.decoding
        every = split_pairs(corpus, self._judged, "dev")
        pairs = {direction: found[:limit] for direction, found in every.items()}
        numbers = [corpus.directions.index(name) for name in pairs for _ in pairs[name]]
        sources = [
            tag(source, split_direction(name)[1]) for name in pairs for source, _ in pairs[name]
        ]
        # Only the lengths of the decoding settings count: they are part of a baseline's identity.
        lengths = ("max_source_length", "max_target_length", "batch_rows")
        greedy = Decoding(beams=1, **{name: getattr(decoding, name) for name in lengths})

        def measured(params: Any) -> dict[str, float]:
            model, scores = self.ready(params, greedy, self.layout()), dict[str, float]()
            found = iter(translations(model, sources, directions=numbers, on_cut=lambda *_: None))
            for direction, sentences in pairs.items():
                references = [reference for _, reference in sentences]
                texts = [next(found).texts[0] for _ in references]
                one = chrf(texts, references, split_direction(direction)[1])
                scores[f"dev/chrf/{direction}"] = one.value()
            return {"dev/chrf": float(np.mean(list(scores.values()))), **scores}

        return Evaluator(self.experiment.training.dev_period, measured)

    @functools.cached_property
    def kept(self) -> list[str]:
        """The directions of `Data.keep`. Raises SettingError for an unknown one."""
        keep = self.experiment.data.keep
        return kept_of(keep, self.directions.names) if keep else []

    @property
    def _judged(self) -> list[str]:
        """The directions whose dev sentences judge training: all but the kept ones."""
        return [name for name in dev_directions(self.corpus, self.stream) if name not in self.kept]

    def evaluators(self) -> list[Evaluator]:
        """Returns dev losses and, if the config asks, dev chrF and cosines of gradients."""
        training = self.experiment.training
        given = self.corpus, self.stream, self.model, self.mesh
        made = [Evaluator(training.dev_period, dev_loss(*given, training.dev_pairs, self.kept))]
        if (rule := training.early_stopping) is not None:
            _check_stopping(rule, self._judged)
            made += [self.dev_chrf(training.dev_pairs)] if rule.by_chrf else []
        if (cosines := training.cosines) is not None:
            made.append(Evaluator(cosines.period, gradient_cosines(*given, cosines, self.trained)))
        return made

    @property
    def note(self) -> dict[str, Any]:
        """The note about the corpus that every checkpoint of a training has."""
        corpus = self.corpus
        names = {"vocabulary": corpus.vocabulary.fingerprint, "corpus": corpus.fingerprint}
        return {**names, "train_pairs": train_pairs(corpus)}

    def sampling(self) -> LearnedSampling | None:
        """Returns the link from a sampler that learns to the stream, or None."""
        sampler, by = self.experiment.data.sampler, self.experiment.data.sample_by
        if not isinstance(sampler, Learned):
            return None
        unit, training = mixture.units(self.corpus, by), self.experiment.training
        # The settings that decide when and on what it learns.
        measured: dict[str, Any] = {f"Training.{name}": getattr(training, name)
                                    for name in ("dev_period", "dev_pairs")}  # fmt: skip
        if sampler.reads == ALIGNMENT and (cosines := training.cosines) is not None:
            about = {"period": cosines.period, "pairs": cosines.pairs}
            about["groups"] = identity(cosines.groups)
            measured = {f"GradientCosines.{name}": value for name, value in about.items()}
        rates = functools.partial(mixture.pair_rates, unit=unit)
        start = sampler(mixture.sizes(self.corpus, by))
        return LearnedSampling(sampler, start, rates, self.stream, measured)

    def check_training(self) -> None:
        """Checks what is known of a training before the corpus. Raises SettingError."""
        training, sampler = self.experiment.training, self.experiment.data.sampler
        _ = self.mesh, self.kept
        if (rule := training.early_stopping) is not None and rule.direction is not None:
            _check_stopping(rule, self.directions.names)
        if isinstance(sampler, Learned):
            setting, period = "Training.dev_period", training.dev_period
            if sampler.reads == ALIGNMENT:
                if training.cosines is None:
                    allowed = "measured for the signal alignment: @cosines.GradientCosines()"
                    raise SettingError("Training.cosines", None, allowed)
                setting, period = "GradientCosines.period", training.cosines.period
            if period >= training.total_steps:
                allowed = f"less than total_steps = {training.total_steps}: a learned sampler "
                allowed += "learns from the evaluations within training"
                raise SettingError(setting, period, allowed)
        if training.cosines is not None:
            training.cosines.of(self.directions)
        _ = self.program.shardings

    def placed_params(self) -> Any:
        """Returns the shapes and shardings of the parameters to translate with.

        Raises SettingError if the model cannot be sharded over the mesh.
        """
        variables = abstract_variables(self.model)
        params, layout = dict(variables["params"]), self.layout()
        if layout is None:
            one = jax.sharding.SingleDeviceSharding(self.mesh.devices.flat[0])
            placed = jax.tree.map(lambda _: one, params)
        else:
            placed = layout.shardings(variables["params_axes"], params)
        return jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), params, placed
        )


def _expected_languages(experiment: Experiment) -> Sequence[str]:
    """Returns the languages before the corpus exists: those of the source if settings name them."""
    training, spec = experiment.training, experiment.data.corpus
    by_name = [*(getattr(training, name) for name in BY_DIRECTION), experiment.tasks,
               training.early_stopping and training.early_stopping.direction,
               experiment.data.keep or None]  # fmt: skip
    if any(one is not None for one in by_name):
        return spec.language_pairs()
    return spec.languages or ["gl"]


def _check_stopping(rule: EarlyStopping, directions: Sequence[str]) -> None:
    """Raises SettingError if training is to stop by dev sentences that do not exist."""
    if not directions:
        raise SettingError("Training.early_stopping", rule, "None: no language has dev sentences")
    if rule.direction not in (None, *directions):
        allowed = f"of a direction that has dev sentences: {', '.join(directions)}"
        raise SettingError("EarlyStopping.metric", rule.metric, allowed)
