"""A pretrained model in a folder of Hugging Face's layout, that a new model begins from."""

import functools
from pathlib import Path

import numpy as np

from m4.data.cache.tokens import PRETRAINED_VOCABULARIES, pretrained_vocabulary
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.jobs.checkpoints.source import Source
from m4.model.gates.switch import switch
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel.layout import Layout
from m4.settings import InputError, SettingError
from m4.storage.files import read_json
from m4.storage.records import record, text
from m4.storage.safetensors import Weights
from m4.train import hf_layout, initial
from m4.train.initial import InitialModel, Old, Use

CONFIG = "config.json"
_CONFIG = record({"model_type": text, "feed_forward_proj?": text, "dense_act_fn?": text})


def is_hf(folder: Path) -> bool:
    """Returns whether a folder has a model of Hugging Face's layout, and is no run of m4."""
    return (folder / CONFIG).is_file() and not (folder / "config.gin").is_file()


class SourceHf(Source):
    """Its arrays under m4's names, in the ids of m4's vocabularies.

    Attributes:
        model: The model of m4 that computes what it does, of `settings`, and `experts` if any.
        ids: Of pad, eos and the decoder's start, in the folder.
        weights: The arrays as they are stored.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a folder; no array is read."""
        self.folder, self.config = folder, read_json(folder / CONFIG, _CONFIG)
        self.weights = Weights(folder)
        try:
            self.family = hf_layout.family_of(self.config)
            self.settings = hf_layout.settings_of(self.config)
            self.experts = hf_layout.experts_of(self.config)
            self.ids = hf_layout.ids_of(self.config)
            self._check_sizes()
            experts = {}
            if (given := self.experts) is not None:
                make = functools.partial(MoeLayer, num_experts=given["num_experts"], gate=switch)
                experts = {"moe": make, "moe_every": given["moe_every"]}
            self.model = Transformer(**self.settings, **experts)
        except InputError as error:
            raise InputError(f"{folder / CONFIG}: {error}") from error
        self.shapes = initial.shapes_of(abstract_variables(self.model)["params"])
        self._places = {path: self._place(path, shape) for path, shape in self.shapes.items()}
        self._check_names()
        self._vocabulary = self._opened_vocabulary()

    def _check_sizes(self) -> None:
        """Checks that no size is beyond all that the files have: the model would never be made."""
        has = self.weights.shapes
        most = max(len(has), *(size for shape in has.values() for size in shape))
        asked = {key: self.settings[name] for name, key in hf_layout.SIZES.items()}
        asked |= self.experts or {}
        for key, size in asked.items():
            if size > most and key != hf_layout.SIZES["relative_distance"]:
                raise InputError(f"{key} = {size}: the files are smaller")

    def _place(self, path: str, shape: tuple[int, ...]) -> hf_layout.HfParameter:
        found = hf_layout.place(path, shape, self.model)
        assert found is not None, path
        has, first = self.weights.shapes, found.names[0]
        if path == hf_layout.EMBEDDING:
            first = next((name for name in hf_layout.TABLES if name in has), first)
            found = found._replace(names=(first,))
        if path == hf_layout.LOGITS and first not in has:
            raise InputError(
                f"{self.folder}: tie_word_embeddings is false in {CONFIG}, and the files have no "
                f"{first}: must be true, or the files complete"
            )
        for name in found.names:
            if name not in has:
                raise InputError(f"{self.folder}: the files have no {name}, as {CONFIG} asks for")
            if has[name] != (wanted := found.shape(shape)):
                raise InputError(
                    f"{self.folder}: {name} is {[*has[name]]}, and {CONFIG} asks for {[*wanted]}"
                )
        return found

    def _check_names(self) -> None:
        """Checks that m4's model has a place for every array, but for copies of the table."""
        used = {name for place in self._places.values() for name in place.names}
        table = self._places[hf_layout.EMBEDDING].names[0]
        for name, shape in self.weights.shapes.items():
            if name in used or hf_layout.UNREAD.fullmatch(name):
                continue
            copy = name in (*hf_layout.TABLES, "lm_head.weight")
            if copy and np.array_equal(self.weights.read(name), self.weights.read(table)):
                continue
            if name == "lm_head.weight":
                raise InputError(
                    f"{self.folder}: tie_word_embeddings is true in {CONFIG}, and the files have "
                    f"an lm_head.weight that is not {table}: must be false"
                )
            raise InputError(f"{self.folder}: {name} {[*shape]} is none that m4's model has")

    def _opened_vocabulary(self) -> Vocabulary:
        path = pretrained_vocabulary(self.folder)
        if path is None:
            fast = (self.folder / "tokenizer.json").is_file()
            raise InputError(
                f"{self.folder}: has no SentencePiece model ({', '.join(PRETRAINED_VOCABULARIES)})"
                + (", and tokenizer.json alone is none; take the file from its hub" if fast else "")
            )
        found, rows = Vocabulary(path), self.settings["vocab_size"]
        pad, eos, start = self.ids
        if [pad, eos] != found.old_ids[:2] or max(self.ids) >= found.size:
            raise InputError(
                f"{self.folder}: pad and eos are {pad}, {eos} in {CONFIG} and "
                f"{found.old_ids[0]}, {found.old_ids[1]} in {path.name}, start is {start}"
            )
        if found.size > rows:
            raise InputError(
                f"{path}: has {found.size:,} pieces, and the embedding {rows:,} rows: another "
                "vocabulary"
            )
        return found

    def vocabulary(self, role: str = "target") -> Vocabulary:
        return self._vocabulary

    def check_model(self, model: Transformer, left: list[str]) -> None:
        wanted = {**initial.computation(self.model), "source_vocab_size": None}
        initial.check_computation(model, wanted, self.folder)
        for path in left:
            # Experts and layers are left by the rules that the config names.
            if "/moe/" not in path and not path.startswith(("encoder_", "decoder_")):
                raise InputError(f"{self.folder}: {path} has no place in the model")

    def params(self, layout: Layout) -> tuple[Old, Use]:
        return self.read, {}

    def read(self, path: str) -> np.ndarray:
        """Returns a parameter of m4's, float32, its rows in the order of m4's vocabulary."""
        made = self._places[path].read(self.weights.read)
        if path not in (hf_layout.EMBEDDING, hf_layout.LOGITS):
            return made
        # Only the first pieces are in another order: the table itself is not copied.
        old_ids = np.asarray(self._vocabulary.old_ids)
        moved = 1 + max(np.flatnonzero(old_ids != np.arange(len(old_ids))), default=-1)
        rows_VM = made.T if path == hf_layout.LOGITS else made
        pad, _, start = self.ids
        start_M = rows_VM[start].copy()
        rows_VM[:moved] = rows_VM[old_ids[:moved]]
        if path == hf_layout.EMBEDDING and start != pad:
            rows_VM[0] = start_M
        return made


def opened(folder: Path, rules: InitialModel, step: int | None) -> SourceHf:
    """Opens a folder for a run. SettingError: the run asks for something that it has not."""
    for name, given, allowed in (
        ("optimizer", rules.optimizer, f"False: {folder} has no state of an optimizer"),
        ("vocabulary", rules.vocabulary, f"None: {folder} has its own"),
        ("run", None if step is None else rules.run, f"{folder}, which has no steps"),
    ):
        if given:
            raise SettingError(f"InitialModel.{name}", given, allowed)
    return SourceHf(folder)
