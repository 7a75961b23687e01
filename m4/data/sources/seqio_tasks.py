"""Reading of seqio tasks and mixtures, as T5X trains on them.

A module that registers them is imported, as T5X's MIXTURE_OR_TASK_MODULE. Nothing is downloaded.
"""

import ast
import difflib
import functools
import hashlib
import inspect
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from etils import epath

from m4.data.directions import pair_of, sides_of, split_direction
from m4.data.sources import SPLITS, IdBlock, Pair
from m4.data.sources.reading.files import digest
from m4.data.sources.reading.lines import Reading
from m4.data.vocabulary import Ragged
from m4.settings import Between, Count, InputError, OneOf, SettingError, checked, import_module

_FEATURES = ("inputs", "targets")
_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
_BLOCK = 1024
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


@checked
@dataclass(eq=False)
class SeqioTasks:
    """The pairs `inputs`, `targets` of a seqio Task, or of the tasks of a Mixture.

    As "ids", a task's preprocessors are run to the end, and a model reads and writes exactly the
    ids of T5X, without a tag. Each task is a direction "en-<task>", whose first side, the inputs,
    is called English. As "text", they are run up to the text, which is cleaned, tagged and
    tokenized in m4's own vocabulary; if a task does not keep its text, ids are decoded.

    Attributes:
        mixture_or_task_name: Registered name.
        mixture_or_task_module: Module whose import registers it. Defaults to none, for a name that
            is registered already.
        use: Form to read, "ids" or "text".
        directions: Task -> direction 'en-de' or, for text, any other, such as 'fr-wo'. Several
            tasks of text in one language pair follow each other. Defaults to 'en-<name of the
            task>'.
        splits: Split -> seqio's. Defaults to train, validation, and test if there is one.
        task_feature_lengths: The sequence_length of preprocessors; longer ids are cut, as in T5X.
            By default nothing is cut, and training pairs beyond CorpusSpec.lengths are dropped.
        use_cached: Whether to read the output of seqio_cache_tasks, in one of cache_dirs.
        cache_dirs: Folders of such outputs.
        seed: Seed of random preprocessors.
        on_bad_line: Reaction to bad text: "fail" or "skip".
    """

    mixture_or_task_name: str
    mixture_or_task_module: str | None = None
    use: Annotated[str, OneOf(("ids", "text"))] = "ids"
    directions: Mapping[str, str] | None = None
    splits: Mapping[str, str] | None = None
    task_feature_lengths: Mapping[str, Annotated[int, Between(1, 2**20)]] | None = None
    use_cached: bool = False
    cache_dirs: Sequence[str] = ()
    seed: Count = 0
    on_bad_line: Annotated[str, OneOf(("fail", "skip"))] = "fail"

    def __post_init__(self) -> None:
        self.reading = Reading("SeqioTasks", self.on_bad_line)
        self.gives_ids = self.use == "ids"
        self._splits = dict(_SPLITS if self.splits is None else self.splits)
        self._of = f"SeqioTasks.mixture_or_task_name = {self.mixture_or_task_name!r}"
        if not {"train"} <= {*self._splits} <= {*SPLITS}:
            raise SettingError("SeqioTasks.splits", self.splits, "of train (needed), dev and test")
        for direction in (self.directions or {}).values():
            try:
                first, _ = split_direction(direction)
            except InputError as error:
                allowed = "'en-xx' or the like"
                raise SettingError("SeqioTasks.directions", direction, allowed) from error
            if self.gives_ids and first != "en":
                allowed = "'en-xx': of ids, what is read is called English (SeqioTasks.use)"
                raise SettingError("SeqioTasks.directions", direction, allowed)

    def language_pairs(self) -> list[str]:
        """Returns the pairs of languages in the order of the tasks; imports seqio (seconds)."""
        return list(dict.fromkeys(map(pair_of, self._directions.values())))

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the text of the tasks of a pair of languages, one after another."""
        assert split in SPLITS, split
        for name in self._named(pair):
            forward = sides_of(self._directions[name])[0] == "first"
            with self.reading.of(f"{name} {split}", f"{name} {split}", "example") as tally:
                every = chain.from_iterable(map(self._decoded, self._blocks(name, split)))
                for number, texts in enumerate(every, 1):
                    if found := tally.pair(number, *(texts if forward else texts[::-1])):
                        yield found

    def blocks(self, pair: str, split: str) -> Iterator[IdBlock]:
        """Yields the ids of a task, in the order of its source."""
        (name,) = self._named(pair)
        return self._blocks(name, split)

    def vocabularies(self) -> dict[str, bytes]:
        """Returns the SentencePiece models of inputs ("source") and targets ("target")."""
        features = next(iter(self._tasks.values())).output_features
        models = {}
        for role, name in zip(("source", "target"), _FEATURES, strict=True):
            feature, use = features[name], "(SeqioTasks.use = 'text')"
            if (model := getattr(feature.vocabulary, "sp_model", None)) is None:
                kind = type(feature.vocabulary).__name__
                said = f"{name} have a {kind}; ids need a SentencePieceVocabulary"
                raise InputError(f"{self._of}: {said} {use}")
            if not feature.add_eos:
                said = f"{name} have add_eos = False; a model of ids needs to see the end"
                raise InputError(f"{self._of}: {said} {use}")
            models[role] = model
        return models

    def rates(self) -> dict[str, float]:
        """Returns direction -> seqio's mixing rate, summed over the tasks of a direction."""
        found: dict[str, float] = {}
        for name, direction in self._directions.items():
            found[direction] = found.get(direction, 0.0) + self._rate(self._tasks[name])
        return found

    def _rate(self, task: Any) -> float:
        """Returns the mixing rate of a task: 1 without a mixture."""
        try:
            mixture = self._provider
            return float(mixture.get_rate(task)) if hasattr(mixture, "get_rate") else 1.0
        except TypeError as error:  # None is no number
            if task.num_input_examples(self._splits["train"]) is not None:
                raise
            said = f"its rate of the task {task.name} needs the number of examples: give its source"
            remedy = "num_input_examples={'train': ...}, or the mixture a number as rate"
            raise InputError(f"{self._of}: {said} {remedy}") from error

    def identity(self) -> dict:
        """Returns the settings, and features, preprocessors and source of each task.

        The code that these call is not part of it (`identity_of`).
        """
        return {
            "source": "seqio",
            "use": self.use,
            "splits": self._splits,
            "task_feature_lengths": dict(self.task_feature_lengths or {}),
            "seed": self.seed,
            **({} if self.gives_ids else self.reading.identity()),
            "by_pair": {
                pair: {
                    name: {
                        "direction": self._directions[name],
                        **identity_of(self._tasks[name], self._splits, self.use_cached),
                    }
                    for name in self._named(pair)
                }
                for pair in self.language_pairs()
            },
        }

    def task_metrics(
        self, direction: str, split: str, sentences: int, predictions: Mapping[int, str]
    ) -> dict[str, Any] | None:
        """Returns the metrics of seqio's Evaluator for a task's predictions.

        Args:
            sentences: Number of sentences that the corpus has of this split.
            predictions: Number of a sentence in the split, from 0 -> its translation.

        Returns:
            The task's name ("task") and the numbers of its metric_fns of (targets, predictions), or
            None where the direction is not that of one task alone, or examples were left out of
            the text.
        """
        if direction not in self._directions.values():
            return None
        if len(named := self._named(pair_of(direction))) > 1:
            return None
        task = self._tasks[named[0]]
        examples = list(self._dataset(named[0], split).as_numpy_iterator())
        if len(examples) != sentences:
            return None
        examples = [examples[number] for number in predictions]
        decode, post = task.output_features["targets"].vocabulary.decode, task.postprocess_fn
        texts = [decode(example["targets"].tolist()) for example in examples]
        both = [
            [post(text, example=example, is_target=is_target)
             for example, text in zip(examples, of, strict=True)]
            for is_target, of in ((True, texts), (False, predictions.values()))
        ]  # fmt: skip
        found: dict[str, Any] = {"task": task.name}
        for function in task.predict_metric_fns:
            for name, value in function(*both).items():
                number = getattr(value, "value", value)  # or seqio.metrics.Scalar
                if isinstance(number, int | float | np.number):
                    found[name] = float(number)
        return found

    @cached_property
    def _seqio(self) -> Any:
        from m4.data import tasks  # seconds, and hundreds of megabytes

        return tasks.seqio

    @cached_property
    def _provider(self) -> Any:
        """The Task or Mixture; SettingError for an unknown module or name."""
        seqio = self._seqio
        if self.mixture_or_task_module is not None:
            try:
                import_module(self.mixture_or_task_module)
            except ImportError as error:
                allowed = f"a module that can be imported, as from PYTHONPATH ({error})"
                setting = "SeqioTasks.mixture_or_task_module"
                raise SettingError(setting, self.mixture_or_task_module, allowed) from error
        known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
        if self.mixture_or_task_name not in known:
            near = difflib.get_close_matches(self.mixture_or_task_name, known, 3, 0.4) or known[:3]
            there = f"{len(known)} are registered, as {', '.join(near)}" if known else "none is"
            allowed = f"a Task or Mixture of SeqioTasks.mixture_or_task_module: {there}"
            setting, name = "SeqioTasks.mixture_or_task_name", self.mixture_or_task_name
            raise SettingError(setting, name, allowed)
        if self.cache_dirs:
            added = {*seqio.utils.get_global_cache_dirs()}
            seqio.add_global_cache_dirs([os.fspath(d) for d in self.cache_dirs if d not in added])
        return seqio.get_mixture_or_task(self.mixture_or_task_name)

    @cached_property
    def _tasks(self) -> dict[str, Any]:
        """Name -> task; InputError for one that cannot be read here."""
        provider = self._provider
        tasks = {task.name: task for task in self._seqio.get_subtasks(provider)}
        for name, task in tasks.items():
            where, features = f"{self._of}: the task {name}", ", ".join(task.output_features)
            if lacking := [f for f in _FEATURES if f not in task.output_features]:
                said = f"has no feature {lacking[0]!r}, its features are {features}"
                raise InputError(f"{where} {said}; pairs are inputs and targets")
            if self.use_cached and task.cache_dir is None:
                folders = ", ".join(self.cache_dirs) or "any folder"
                raise InputError(f"{where} is not cached in {folders} (SeqioTasks.cache_dirs)")
            if task.requires_caching and not self.use_cached:
                raise InputError(f"{where} needs SeqioTasks.use_cached = True")
            self._rate(task)
        self._check_splits(tasks)
        return tasks

    def _check_splits(self, tasks: Mapping[str, Any]) -> None:
        """Raises InputError where training pairs of a task, or dev pairs of all, are missing."""
        for split, theirs in self._splits.items():
            having = [name for name, task in tasks.items() if theirs in task.splits]
            lacking = next((name for name in tasks if name not in having), None)
            optional = split == "test" and self.splits is None
            if lacking is not None and (split == "train" or not (having or optional)):
                there = ", ".join(tasks[lacking].splits)
                said = f"the task {lacking} has no split {theirs!r}, it has {there}"
                raise InputError(f"{self._of}: {said} (SeqioTasks.splits names train, dev, test)")

    @cached_property
    def _directions(self) -> dict[str, str]:
        """Task -> direction; SettingError for an unknown task, or two of ids with one name."""
        given = dict(self.directions or {})
        if unknown := [name for name in given if name not in self._tasks]:
            allowed = f"of the tasks {', '.join(self._tasks)}"
            raise SettingError("SeqioTasks.directions", unknown[0], allowed)
        named = {name: f"en-{re.sub('[^A-Za-z0-9_]', '_', name)}" for name in self._tasks}
        made = {**named, **given}
        if self.gives_ids and len({*made.values()}) < len(made):
            raise SettingError("SeqioTasks.directions", made, "another one for each task of ids")
        return made

    def _named(self, pair: str) -> list[str]:
        named = [name for name, d in self._directions.items() if pair_of(d) == pair_of(pair)]
        if not named:
            raise InputError(f"{self._of}: no {pair}; {', '.join(self.language_pairs())}")
        return named

    def _dataset(self, name: str, split: str) -> Any:
        """Returns a task's examples in their order, as a tf.data.Dataset."""
        return self._tasks[name].get_dataset(
            sequence_length=self.task_feature_lengths, split=self._splits[split],
            use_cached=self.use_cached, shuffle=False, seed=self.seed, num_epochs=1,
            try_in_mem_cache=False,
        )  # fmt: skip

    def _blocks(self, name: str, split: str) -> Iterator[IdBlock]:
        if self._splits.get(split) not in self._tasks[name].splits:
            return
        dataset = self._dataset(name, split)
        kept = [*_FEATURES, *(f"{f}_pretokenized" for f in _FEATURES)]
        dataset = dataset.map(lambda example: {k: example[k] for k in kept if k in example})
        for rows in dataset.ragged_batch(_BLOCK):
            sides, columns = [], []
            for feature in _FEATURES:
                sides.append(side := _ragged(rows[feature]))
                texts = rows.get(f"{feature}_pretokenized")
                given = [b""] * len(side.lengths) if texts is None else texts.numpy()
                columns.append([text.decode("utf-8", "replace") for text in given])
            yield IdBlock(sides[0], sides[1], [*map(Pair, *columns)])

    def _decoded(self, block: IdBlock) -> Iterator[tuple[str, str]]:
        """Yields the text of each pair: as before it was tokenized, else its ids decoded."""
        features = next(iter(self._tasks.values())).output_features
        columns, given = [], zip(*block.texts, strict=True)
        for name, side, texts in zip(_FEATURES, block[:2], given, strict=True):
            if not all(texts):
                decode = features[name].vocabulary.decode
                texts = [t or decode(row) for t, row in zip(texts, side.rows(), strict=True)]
            columns.append(texts)
        yield from zip(*columns, strict=True)


def _ragged(value: Any) -> Ragged:
    """Converts TensorFlow's ragged batch; rows of a dense one have one length."""
    if hasattr(value, "row_splits"):
        return Ragged(value.values.numpy().astype(np.int32), np.diff(value.row_splits.numpy()))
    rows = value.numpy().astype(np.int32)
    return Ragged(rows.reshape(-1), np.full(len(rows), rows.shape[1], np.int64))


def identity_of(task: Any, splits: Mapping[str, str], use_cached: bool) -> dict[str, Any]:
    """Returns the identity of a task.

    It reads the files of the source, or those that seqio_cache_tasks wrote, whose hashes are
    remembered, and the file of each function, without comments and layout. `splits` are m4's ->
    seqio's.
    """
    there = sorted({theirs for theirs in splits.values() if theirs in task.splits})
    cached = {split: _files(f"{task.cache_dir}/*{split}*") for split in there if use_cached}
    return {
        "features": {n: f"{f.vocabulary} {f.add_eos}" for n, f in task.output_features.items()},
        "preprocessors": [described(one) for one in task.preprocessors],
        "from": cached if use_cached else _source(task.source, there),
    }


def described(value: Any) -> Any:
    """Returns a value as JSON.

    A function is its name, the hash of its file, and the arguments that are bound to it; other
    objects are text, without addresses in memory.
    """
    if isinstance(value, functools.partial):
        given = {**{str(i): v for i, v in enumerate(value.args)}, **value.keywords}
        return {"of": described(value.func), **{k: described(v) for k, v in given.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [described(one) for one in value]
    unwrapped = inspect.unwrap(value) if callable(value) else value
    named = unwrapped if hasattr(unwrapped, "__qualname__") else type(unwrapped)
    name = f"{named.__module__}.{named.__qualname__}"
    return f"{name} {code}" if (code := _code(named)) else name


def _code(named: Any) -> str | None:
    """Returns the SHA-256 of the file that defines a value, or None for installed code."""
    try:
        path = inspect.getsourcefile(named)
    except TypeError:  # built in
        path = None
    if path is None or path.startswith(_INSTALLED):
        return None
    return _code_of_file(path, os.stat(path).st_mtime_ns)


@functools.cache
def _code_of_file(path: str, _changed_ns: int) -> str:
    tree = ast.dump(ast.parse(Path(path).read_text(encoding="utf-8")))
    return hashlib.sha256(tree.encode()).hexdigest()[:16]


def _source(source: Any, splits: Sequence[str]) -> dict[str, Any]:
    """Returns a seqio.DataSource as its files' hashes, its TFDS dataset, or its function."""
    about: dict[str, Any] = {"of": described(type(source))}
    if loader := getattr(source, "tfds_dataset", None):
        chosen = loader.tfds_splits or {}
        # The size first: then the name has the version.
        named = {
            s: [loader.size(s), loader.resolved_tfds_name(s), str(chosen.get(s, s))] for s in splits
        }
        return {**about, "datasets": named}
    if patterns := getattr(source, "_split_to_filepattern", None):
        about["files"] = {split: _files(patterns[split]) for split in splits}
    for name in ("_dataset_fn", "_reader"):
        if function := getattr(source, name, None):
            about["read"] = described(function)
    return about


def _files(pattern: Any) -> dict[str, list[Any]]:
    patterns = [pattern] if isinstance(pattern, str | os.PathLike) else pattern
    paths = [epath.Path(os.fspath(one)) for one in patterns]
    found = [file for path in paths for file in sorted(path.parent.glob(path.name))]
    # The cache of a task `a` has a folder of the task `a:b`.
    return {file.name: digest(file) for file in found if file.is_file()}
