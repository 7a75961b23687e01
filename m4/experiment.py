"""One experiment in five parts: data, model, training, decoding, baselines. No I/O.

A config binds them (`m4.config`); Python makes them as plain objects. A bilingual baseline is an
`Experiment` too: in a config the same one under a scope, which says only what differs.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from m4.data.corpus import CorpusSpec
from m4.data.directions import pair_of
from m4.data.samplers import Kept, Planned, Sampler
from m4.data.samplers.learned import Learned
from m4.data.samplers.temperature import temperature
from m4.data.sources import SPLITS
from m4.data.stream.stream import Stream
from m4.eval.decoding.sampling import Sampling as Sampling
from m4.eval.decoding.settings import Decoding as Decoding
from m4.eval.scoring.levels import DEFAULT_LEVELS
from m4.eval.scoring.levels import ResourceLevels as ResourceLevels
from m4.model.transformer import Transformer
from m4.settings import MUTABLE, Between, InputError, OneOf, SettingError, checked, mutable_of
from m4.storage.objects import check_place
from m4.train.bad_steps import BadSteps as BadSteps
from m4.train.multitask.groups import Grouping
from m4.train.training import Training as Training


@checked
@dataclasses.dataclass(frozen=True)
class Data:
    """The text that is trained on, and how often each language is seen.

    Attributes:
        corpus: The text, and how it is cleaned and tokenized.
        sampler: Function from sizes of directions to shares, such as @temperature.temperature.
        sample_by: Unit of sizes and shares: "examples" (pairs) or "tokens".
        stream: Function of (cache, phases, seed, ...) that returns the training stream.
        levels: Which languages are high-, medium- and low-resource.
        about: Description of the corpus for the report.
        data_dir: Folder or address (gs://...) of the tokenized corpus, which runs may share.
            Defaults to MODEL_DIR/data.
        disk_gigabytes: Space on this machine's disk for training arrays if data_dir is an address.
            Arrays beyond it are fetched when they are needed and replace others.
        keep: Languages ("gl") or directions ("en-gl") of the initial model, whose test sets show
            what the run forgets. They may lack training pairs. Only the dev losses of the others
            are averaged and stop training.
        keep_share: Share of all draws that replays the kept directions. Defaults to 0.
    """

    corpus: CorpusSpec
    sampler: Sampler = temperature
    sample_by: Annotated[str, OneOf(("examples", "tokens"))] = "examples"
    stream: Callable[..., Stream] = Stream
    levels: Annotated[ResourceLevels, MUTABLE] = DEFAULT_LEVELS
    about: Annotated[str | None, MUTABLE] = None
    data_dir: Annotated[str | None, MUTABLE] = None
    disk_gigabytes: Annotated[float, Between(0, 1e6, above=True), MUTABLE] = 100.0
    keep: Sequence[str] = ()
    keep_share: Annotated[float, Between(0, 1, below=True)] = 0.0

    def __post_init__(self) -> None:
        if self.keep_share and not self.keep:
            raise SettingError("Data.keep_share", self.keep_share, "0 where Data.keep names none")
        if self.keep and isinstance(self.sampler, (Planned, Learned)):
            allowed = "neither a schedule nor one that learns, with Data.keep"
            raise SettingError("Data.sampler", self.sampler, allowed)
        if self.data_dir is not None:
            try:
                check_place(self.data_dir)
            except InputError as error:
                said = str(error).removeprefix(f"{self.data_dir}: ")
                allowed = f"a folder or an address: {said}"
                raise SettingError("Data.data_dir", self.data_dir, allowed) from error

    @property
    def full_sampler(self) -> Sampler:
        """The sampler, with the share of what is kept."""
        return Kept(self.sampler, self.keep, self.keep_share) if self.keep else self.sampler

    @property
    def untrained(self) -> set[str]:
        """The language pairs that may lack training pairs."""
        return {*map(pair_of, self.keep)}


@checked
@dataclasses.dataclass(frozen=True)
class Baselines:
    """The bilingual models of ΔBLEU: an experiment for each resource level.

    Attributes:
        high, medium, low: Experiments whose `data.corpus` is replaced by one language's pairs from
            the multilingual corpus, with a vocabulary of its own.
        folder: Folder of finished models, which runs may share. Defaults to MODEL_DIR/baselines.
    """

    high: "Experiment"
    medium: "Experiment"
    low: "Experiment"
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and "://" in self.folder:
            raise SettingError("Baselines.folder", self.folder, "a local folder, or None")

    def of(self, level: str) -> "Experiment":
        """Returns the experiment of a resource level."""
        return {"high": self.high, "medium": self.medium, "low": self.low}[level]


@checked
@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that decides one run.

    Attributes:
        model_dir: The run's folder, under which everything is read and written.
        data, training, decoding: Settings described in the classes of these names.
        baselines: The bilingual models. Defaults to none, without ΔBLEU.
        model: Function of (vocab_size, directions, ...) that returns the Transformer.
        tasks: Function that returns the sets of directions that a gate by task (`by_direction`)
            routes alike, such as @groups.by_target. By default each direction is a task.
        testsets: Test sets other than the corpus's, by name (`m4.data.testsets`, or a source).
        vocabulary_multiple: The embedding's rows are rounded up to a multiple of this, so that they
            divide over meshes and fill the tiles of matrix units.
    """

    model_dir: Annotated[str, MUTABLE]
    data: Data
    training: Training
    model: Callable[..., Transformer] = Transformer
    decoding: Annotated[Decoding, MUTABLE] = dataclasses.field(default_factory=Decoding)
    baselines: Annotated[Baselines | None, MUTABLE] = None
    tasks: Grouping | None = None
    vocabulary_multiple: Annotated[int, Between(1, 2**16)] = 128
    testsets: Annotated[Mapping[str, Any], MUTABLE] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, testset in self.testsets.items():
            if not re.fullmatch(r"[A-Za-z0-9_]+", name) or name in SPLITS:
                allowed = f"named by letters, digits and _, not {', '.join(SPLITS)}"
                raise SettingError("Experiment.testsets", self.testsets, allowed)
            if not (hasattr(testset, "segments") or hasattr(testset, "pairs")):
                allowed = f"test sets, with brackets: {{'{name}': @aligned.Aligned()}}"
                raise SettingError("Experiment.testsets", self.testsets, allowed)
        own, shared = self.model_dir.rstrip("/"), self.data.data_dir
        if shared is not None and f"{shared.rstrip('/')}/".startswith(f"{own}/"):
            allowed = "a folder outside of MODEL_DIR; None: MODEL_DIR/data"
            raise SettingError("Data.data_dir", shared, allowed)
        if self.data.keep and self.baselines is not None:
            allowed = "None with Data.keep: compare with a run that has baselines (m4 report)"
            raise SettingError("Experiment.baselines", self.baselines, allowed)

    @property
    def folder(self) -> Path:
        """MODEL_DIR as a local folder, once the run is open (`m4.jobs.open_run`)."""
        return Path(self.model_dir)


def partial_arguments(made: functools.partial[Any]) -> dict[str, Any]:
    """Returns all arguments of a functools.partial by name."""
    return dict(inspect.signature(made.func).bind_partial(*made.args, **made.keywords).arguments)


def identity(value: Any) -> Any:
    """Returns everything that decides a part of an experiment, defaults included, as JSON."""
    if isinstance(value, Mapping):
        return {str(k): identity(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [identity(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if (made := _made(value)) is None:
        return type(value).__qualname__
    target, arguments = made
    return {"of": target.__qualname__, **{name: identity(one) for name, one in arguments.items()}}


def _made(value: Any) -> tuple[Any, dict[str, Any]] | None:
    """Returns the class or function of an object and its arguments, with plain defaults, if any."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    target, given = value, {}
    if isinstance(value, functools.partial):
        target, given = value.func, partial_arguments(value)
    if not callable(target):
        return None
    plain = bool | int | float | str | tuple | None
    parameters = inspect.signature(target).parameters
    defaults = {name: p.default for name, p in parameters.items() if isinstance(p.default, plain)}
    return target, {**defaults, **given}


def changes(before: Experiment, after: Experiment) -> dict[str, list[str]]:
    """Returns setting -> [before, after] for all immutable settings that differ."""
    one, two = dict(_settings(before)), dict(_settings(after))
    found = {name: [each.get(name, "not set") for each in (one, two)] for name in one | two}
    return {name: values for name, values in found.items() if values[0] != values[1]}


def _settings(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yields ("training.optimizer.schedule.peak", "0.001") of each setting that is not mutable."""
    literal = value is None or isinstance(value, bool | int | float | str | Mapping | list | tuple)
    made = None if literal else _made(value)
    if made is None:
        yield place, repr(value) if literal else type(value).__qualname__
        return
    target, arguments = made
    if place:
        yield place, f"@{target.__qualname__}"
    for name, one in arguments.items():
        if name not in mutable_of(target):
            yield from _settings(one, f"{place}.{name}" if place else name)
