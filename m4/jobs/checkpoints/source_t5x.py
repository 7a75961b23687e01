"""A checkpoint of T5X that a new model begins from."""

import re
from pathlib import Path
from typing import Any

from m4.data.cache.tokens import vocabulary_file
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.jobs.checkpoints.source import Source
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.settings import InputError, SettingError
from m4.storage import t5x
from m4.storage.t5x import T5xCheckpoint
from m4.train import t5x_layout
from m4.train.initial import InitialModel, Old, Plan, Use, check_adafactor, with_moments
from m4.train.program import TrainProgram
from m4.train.state import TrainState

_EMBEDDING = re.compile(r"(source_)?token_embedder/embedding")


class SourceT5x(Source):
    """Its arrays under m4's names, and the vocabulary that it was trained with."""

    def __init__(
        self, folder: Path, rules: InitialModel, step: int | None, known: int | None
    ) -> None:
        def chosen() -> str:
            return str(_chosen(folder, known if step is None else step))

        self.folder = Path(distributed.on_primary_then_broadcast("checkpoints", chosen))
        self._there = T5xCheckpoint(self.folder)
        self.step = self._there.step
        try:
            self._sources = t5x_layout.sources(self._there.shapes)
            t5x_layout.check_shared_bias(self._there.shapes, self._there.read)
        except InputError as error:
            raise InputError(f"{self.folder}: {error}") from error
        of = self._there.shapes
        self.shapes = {
            path: t5x_layout.part_shape(source, of) for path, source in self._sources.items()
        }
        if rules.optimizer and not any(name.startswith(t5x_layout.STATES) for name in of):
            allowed = f"False: {self.folder} has no state of an optimizer"
            raise SettingError("InitialModel.optimizer", True, allowed)
        self._place = self._vocabulary_place(rules)
        for path, shape in self.shapes.items():
            if (match := _EMBEDDING.fullmatch(path)) is not None:
                self._check_rows("source" if match[1] else "target", shape[0])

    def _vocabulary_place(self, rules: InitialModel) -> Path:
        role = "source" if self._separate else None
        place = self.folder.parent if rules.vocabulary is None else Path(rules.vocabulary)
        if not vocabulary_file(place, role).is_file():
            allowed = (
                f"the SentencePiece model that {self.folder} was trained with (FILE.model), or the "
                f"folder that has {vocabulary_file(Path(), role)}"
            )
            raise SettingError("InitialModel.vocabulary", rules.vocabulary, allowed)
        return place

    @property
    def _separate(self) -> bool:
        return "source_token_embedder/embedding" in self.shapes

    def vocabulary(self, role: str) -> Vocabulary:
        return Vocabulary(vocabulary_file(self._place, role if self._separate else None))

    def _check_rows(self, role: str, rows: int) -> None:
        vocabulary = self.vocabulary(role)
        if vocabulary.size > rows:
            raise InputError(
                f"{vocabulary.path} has {vocabulary.size:,} pieces, and the embedding of "
                f"{self.folder} {rows:,} rows: another vocabulary (InitialModel.vocabulary)"
            )

    def check_model(self, model: Transformer, left: list[str]) -> None:
        is_t5 = any(source.name.startswith("encoder/") for source in self._sources.values())
        if is_t5 and model.absolute_positions:
            allowed = "False: the checkpoint of T5X has relative positions alone"
            raise SettingError("Transformer.absolute_positions", True, allowed)
        if "logits_dense/kernel" in left:
            allowed = f"False: {self.folder} has logits_dense"
            raise SettingError("Transformer.tied_logits", True, allowed)
        for path in left:
            # Layers, experts and gates are left by the rules that the config names.
            if not re.match(r"(encoder|decoder)_\d+/", path) or "/wi_" in path:
                raise InputError(
                    f"{self.folder}: {path} {list(self.shapes[path])} has no place in the model"
                )

    def params(self, layout: Layout) -> tuple[Old, Use]:
        return lambda path: t5x_layout.parameter(self._sources[path], self._there.read), {}

    def with_optimizer(self, program: TrainProgram, plan: Plan) -> tuple[TrainState, str]:
        check_adafactor(program.optimizer)
        try:
            given = {
                path: t5x_layout.moments(source, self._there.shapes, self._there.read)
                for path, source in self._sources.items()
            }
        except InputError as error:
            said = str(error).removeprefix(f"{self.folder}: ")
            raise InputError(f"{self.folder}: {said}") from error

        def init(params: Any, given: Any) -> Any:
            return with_moments(program.optimizer.init(params), self.step, given)

        return self.begin(program, plan, init, given, step=self.step), "kept"


def is_t5x(folder: Path) -> bool:
    """Returns True if a folder is T5X's MODEL_DIR with a checkpoint, or one of these."""
    return t5x.is_checkpoint(folder) or bool(t5x.steps(folder))


def _chosen(folder: Path, step: int | None) -> Path:
    if t5x.is_checkpoint(folder):
        if step is not None and (found := T5xCheckpoint(folder).step) != step:
            raise InputError(f"{folder}: is of step {found}, not {step}")
        return folder
    known = t5x.steps(folder)
    if step is None:
        return known[max(known)]
    if step not in known:
        listed = ", ".join(map(str, sorted(known)))
        raise InputError(f"{folder}: no checkpoint of step {step}; there are {listed}")
    return known[step]
