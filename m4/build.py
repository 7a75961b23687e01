"""The parts that a job computes with, built in one place: `build(experiment, corpus)`.

Training, plans, dry runs, decoding and baselines use it. Without a corpus the sizes are those that
the config asks for: checking them is the same call.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from m4.data.cache.cache import Cache
from m4.data.directions import pair_of
from m4.data.samplers.kept import kept_of
from m4.data.samplers.learned import ALIGNMENT, Learned
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from m4.eval.decoding.translate import Translator
from m4.eval.scoring.dev_chrf import dev_chrf
from m4.experiment import Data, Decoding, Experiment, Training, identity
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel.layout import Layout
from m4.parallel.mesh import axis_rules_context
from m4.settings import SettingError, first_line
from m4.train import program
from m4.train.batches import BatchShape
from m4.train.early_stopping import EarlyStopping
from m4.train.loop import Evaluator
from m4.train.measuring.dev import dev_directions, dev_loss
from m4.train.multitask.cosines import gradient_cosines
from m4.train.multitask.groups import Directions, check_groups
from m4.train.program import TrainProgram
from m4.train.sampling import LearnedSampling
from m4.train.training import BY_DIRECTION


def build(
    experiment: Experiment,
    corpus: Cache | None,
    *,
    languages: Sequence[str] | None = None,
    make_mesh: Callable[[], Mesh] | None = None,
) -> "Parts":
    """Returns the parts of an experiment; nothing is computed, and each is made when it is used.

    Args:
        corpus: Decides the sizes of vocabularies and the directions. None: the sizes that the
            config asks for. A built vocabulary may come a little below, but not the model's sizes.
        languages: Languages without a corpus. Defaults to those of the config.
        make_mesh: Makes the mesh. Defaults to the config's, over all devices.

    Raises:
        SettingError: A model that cannot be made, or tasks that do not group the directions.
    """
    training, data = experiment.training, experiment.data
    if corpus is not None:
        names = corpus.directions
        pairs = {name: corpus.size(pair_of(name), "train") for name in names}
        levels: dict[str, list[str]] = {"high": [], "medium": [], "low": []}
        for name, size in pairs.items():
            levels[data.levels.of(size)].append(name)
        directions = Directions(names, pairs, levels)
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
    tasks: dict[str, Any] = {}
    if experiment.tasks is not None:
        groups = check_groups(experiment.tasks, directions, "Experiment.tasks")
        of = {name: task for task, group in enumerate(groups.values()) for name in group}
        tasks["tasks"] = [of[name] for name in directions.names]
    model = experiment.build_model(sizes, len(names), **tasks)
    return Parts(
        training, data, experiment.decoding, model, directions, corpus, make_mesh or training.mesh
    )


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of an experiment."""

    training: Training
    data: Data
    decoding: Decoding
    model: Transformer  # the model, without parameters
    # Directions in the order of the corpus, with their sizes and resource levels.
    directions: Directions
    _corpus: Cache | None
    _make_mesh: Callable[[], Mesh]

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh. SettingError: these devices cannot make it."""
        return self._make_mesh()

    @property
    def corpus(self) -> Cache:
        """The corpus, for the parts that need one; `build` must have been given it."""
        assert self._corpus is not None
        return self._corpus

    @functools.cached_property
    def stream(self) -> Stream:
        """The batches of training, drawn at the sampler's first rates."""
        training, data = self.training, self.data
        return mixture.make_stream(
            self.corpus,
            data.full_sampler,
            data.sample_by,
            training.total_steps,
            data.stream,
            seed=training.seed,
            batch_rows=training.batch_size,
            source_length=data.corpus.lengths["inputs"],
            target_length=data.corpus.lengths["targets"],
        )

    @property
    def batch_shape(self) -> BatchShape:
        """The shape of the batches."""
        lengths = self.data.corpus.lengths
        return self.training.batch_size, lengths["inputs"], lengths["targets"]

    @functools.cached_property
    def trained(self) -> Directions:
        """The directions that are trained, in the order of the stream.

        SettingError: a gate by task, and a sampler that leaves out a direction.
        """
        if self._corpus is None:
            return self.directions
        names = self.stream.directions
        if self.model.by_task and list(names) != list(self.directions.names):
            allowed = "a sampler with a rate for every direction, for a gate by task"
            raise SettingError("Data.sampler", self.data.sampler, allowed)
        inside = {level: [name for name in members if name in names]
                  for level, members in self.directions.levels.items()}  # fmt: skip
        return Directions(names, {name: self.directions.sizes[name] for name in names}, inside)

    @functools.cached_property
    def program(self) -> TrainProgram:
        """The training step. SettingError: sizes that do not divide over the mesh."""
        return program.train_program(
            self.training, self.model, self.trained, self.mesh, self.batch_shape
        )

    def layout(self) -> Layout | None:
        """Returns the model's layout in translation. None: on one device."""
        training, mesh = self.training, self.mesh
        with axis_rules_context(mesh, training.extra_axis_rules):
            program.check_model(mesh, self.model)
        if mesh.size == 1:
            return None
        # A step of decoding has one position, so rules for "length" are left out.
        rules = [rule for rule in training.extra_axis_rules if rule[0] != "length"]
        return Layout(mesh, training.fsdp_axes, rules)

    def layout_or_first_device(self, job: str) -> Layout | None:
        """Returns `layout`; None, with a line on stderr, where the mesh cannot be made."""
        try:
            return self.layout()
        except ValueError as error:
            why = first_line(error)
            print(f"{job}: on the first device alone: {why}", file=sys.stderr)
            return None

    def ready(self, params: Any, decoding: Decoding, layout: Layout | None) -> Translator:
        """Returns the model with parameters, to translate by these settings."""
        corpus = self.corpus
        return Translator(
            self.model,
            params,
            corpus.vocabulary,
            decoding,
            layout,
            corpus.length_factors,
            normalise=self.data.corpus.cleaning.normalise,
            trained=corpus.directions,
        )

    def dev_chrf(self, limit: int | None = None) -> Evaluator:
        """Returns the evaluation by chrF of at most `limit` dev sentences a direction."""

        def ready(params: Any, decoding: Decoding) -> Translator:
            return self.ready(params, decoding, self.layout())

        measured = dev_chrf(self.corpus, ready, self.decoding, self._judged(), limit)
        return Evaluator(self.training.dev_period, measured)

    def _judged(self) -> list[str]:
        """Returns the directions by whose dev sentences training is judged: none that is kept."""
        kept = kept_of(self.data.keep, self.corpus.directions)
        return [name for name in dev_directions(self.corpus, self.stream) if name not in kept]

    def evaluators(self) -> list[Evaluator]:
        """Returns dev losses and, where they are asked for, dev chrF and cosines of gradients.

        Raises:
            SettingError: Early stopping by a direction that has no dev sentences.
        """
        training, given = self.training, (self.corpus, self.stream, self.model, self.mesh)
        kept = kept_of(self.data.keep, self.corpus.directions)
        made = [Evaluator(training.dev_period, dev_loss(*given, training.dev_pairs, kept))]
        if (rule := training.early_stopping) is not None:
            _check_stopping(rule, self._judged())
            made += [self.dev_chrf(training.dev_pairs)] if rule.by_chrf else []
        if (cosines := training.cosines) is not None:
            made.append(Evaluator(cosines.period, gradient_cosines(*given, cosines, self.trained)))
        return made

    def sampling(self) -> LearnedSampling | None:
        """Returns what joins a sampler that learns to the stream. None: it does not learn."""
        sampler, by = self.data.sampler, self.data.sample_by
        if not isinstance(sampler, Learned):
            return None
        unit = mixture.units(self.corpus, by)
        return LearnedSampling(
            sampler,
            sampler(mixture.sizes(self.corpus, by)),
            lambda rates: mixture.pair_rates(rates, unit),
            self.stream,
            _measured(self.training, sampler),
        )

    def check_training(self) -> None:
        """Checks all of a multilingual training whose size is known before the corpus is there.

        Raises:
            SettingError: A mesh that these devices cannot make, sizes that do not divide over it or
                do not fit together, an optimizer or sampler that cannot be made.
        """
        training, sampler = self.training, self.data.sampler
        _ = self.mesh
        if (rule := training.early_stopping) is not None and rule.direction is not None:
            _check_stopping(rule, self.directions.names)
        if isinstance(sampler, Learned):
            _check_learned(training, sampler)
        if training.cosines is not None:
            training.cosines.of(self.directions)
        if self.data.keep:
            kept_of(self.data.keep, self.directions.names)
        _ = self.program.shardings

    def check_decoding(self) -> None:
        """Checks the model and its layout. SettingError: it cannot lie over the mesh."""
        variables = abstract_variables(self.model)
        if layout := self.layout():
            layout.shardings(variables["params_axes"], variables["params"])

    def placed_params(self) -> Any:
        """Returns the parameters to translate with as shapes with shardings."""
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
    """Returns the languages before the corpus is there, of the source where settings name them."""
    training, spec = experiment.training, experiment.data.corpus
    by_name = [*(getattr(training, name) for name in BY_DIRECTION)]
    by_name += [training.early_stopping and training.early_stopping.direction, experiment.tasks]
    by_name += [experiment.data.keep or None]
    if any(one is not None for one in by_name):
        return spec.language_pairs()
    return spec.languages or ["gl"]


def _check_learned(training: Training, sampler: Learned) -> None:
    """SettingError: a sampler that learns has nothing to learn from."""
    setting, period = "Training.dev_period", training.dev_period
    if sampler.reads == ALIGNMENT:
        if training.cosines is None:
            allowed = "measured for the signal alignment: @cosines.GradientCosines()"
            raise SettingError("Training.cosines", None, allowed)
        setting, period = "GradientCosines.period", training.cosines.period
    if period >= training.total_steps:
        raise SettingError(
            setting,
            period,
            f"less than total_steps = {training.total_steps}: a learned sampler learns from the "
            "evaluations within training",
        )


def _check_stopping(rule: EarlyStopping, directions: Sequence[str]) -> None:
    """SettingError: training is to stop by dev sentences that are not there."""
    if not directions:
        raise SettingError("Training.early_stopping", rule, "None: no language has dev sentences")
    if rule.direction not in (None, *directions):
        allowed = f"of a direction that has dev sentences: {', '.join(directions)}"
        raise SettingError("EarlyStopping.metric", rule.metric, allowed)


def _measured(training: Training, sampler: Learned) -> Mapping[str, Any]:
    """Returns the settings that decide when and on what a sampler learns."""
    if sampler.reads == ALIGNMENT and (cosines := training.cosines) is not None:
        periods = {"period": cosines.period, "pairs": cosines.pairs}
        about = {**periods, "groups": identity(cosines.groups)}
        return {f"GradientCosines.{name}": value for name, value in about.items()}
    return {"Training.dev_period": training.dev_period, "Training.dev_pairs": training.dev_pairs}
