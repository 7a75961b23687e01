"""One whole experiment: `Setup`, which gin fills in, and what every job does with it first."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from m4.data.cache.cache import Cache
from m4.data.inspection.audit import write_report as write_report_of_data
from m4.data.samplers import Sampler
from m4.data.samplers.temperature import temperature
from m4.data.stream.mixture import check_unit, make_stream
from m4.data.stream.stream import Stream
from m4.eval.decoding.settings import Decoding
from m4.eval.report.results import Results, write_results
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.parallel.jax_setup import set_up
from m4.parallel.layout import Layout
from m4.parallel.mesh import make_mesh
from m4.progress import ProgressBar
from m4.storage import remote
from m4.train import loop
from m4.train.baselines import Recipe


@dataclasses.dataclass(frozen=True)
class Setup:
    """One experiment, whole.

    Attributes:
        model_dir: everything is read and written under it. total_steps: where training ends.
        corpus: (folder, ...) -> Cache, e.g. @cache.prepare with its source and languages.
        model: (vocab_size) -> Transformer. train: see `loop.train`. mesh: () -> Mesh.
        mixture: to_english, from_english or english_centric.
        sampler: sizes of the directions -> their shares, e.g. @temperature.temperature.
        sample_by: what sizes and shares are counted in, "examples" (pairs) or "tokens".
        stream: the training stream, (cache, phases, seed, ...) -> Stream, e.g. @stream.Stream.
        lengths: {"inputs": pieces, "targets": pieces} of a packed row.
        batch_size: packed rows a step, over all devices. seed: of everything that is drawn.
        dev_period: steps between dev losses; dev_pairs: at most so many pairs a direction.
        decoding: of test sets and translations.
        baselines: resource level ("high", "medium", "low") -> recipe of its bilingual models.
        baselines_dir: where these are kept; None: MODEL_DIR/baselines.
        high, low: training pairs from which a language is high-resource, and below which low.
        report: see `m4.eval.report.results`. about: what the corpus is, for the report.
    """

    model_dir: str
    total_steps: int
    corpus: Callable[..., Cache]
    model: Callable[..., Transformer] = Transformer
    train: Callable[..., loop.Trained] = loop.train
    mesh: Callable[..., Any] = make_mesh
    mixture: str = "english_centric"
    sampler: Sampler = temperature
    sample_by: str = "examples"
    stream: Callable[..., Stream] = Stream
    lengths: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"inputs": 128, "targets": 128}
    )
    batch_size: int = 64
    seed: int = 0
    dev_period: int = 1000
    dev_pairs: int = 200
    decoding: Decoding = dataclasses.field(default_factory=Decoding)
    baselines: Mapping[str, Recipe] | None = None
    baselines_dir: str | None = None
    high: int = 3000
    low: int = 1000
    report: Callable[..., Results] = write_results
    about: str = ""

    def __post_init__(self) -> None:
        # At once: a corpus may take minutes to make.
        check_unit(self.sample_by)
        if self.baselines_dir is not None and "://" in self.baselines_dir:
            raise ValueError(
                f"jobs.Setup.baselines_dir = {self.baselines_dir}: must be a local folder; "
                "with None they are in MODEL_DIR, wherever that is"
            )
        _check_number("total_steps", self.total_steps, 0, "TRAIN_STEPS")
        _check_number("batch_size", self.batch_size, 1, "BATCH_SIZE")
        for name in ("dev_period", "dev_pairs"):
            _check_number(name, getattr(self, name), 1)
        for name in ("seed", "high", "low"):
            _check_number(name, getattr(self, name), 0)
        if set(self.lengths) != {"inputs", "targets"}:
            raise ValueError(
                f"jobs.Setup.lengths = {dict(self.lengths)}: must be {{'inputs': ..., "
                "'targets': ...} (TASK_FEATURE_LENGTHS)"
            )
        for name, length in self.lengths.items():
            # A tag, a piece, eos.
            _check_number(f"lengths[{name!r}]", length, 3, "TASK_FEATURE_LENGTHS")

    @property
    def folder(self) -> Path:
        """MODEL_DIR; of one in an object store the working copy (`m4.storage.remote`)."""
        return remote.local(self.model_dir)


def _check_number(name: str, value: object, least: int, macro: str = "") -> None:
    """ValueError: an attribute of Setup that is not a whole number from `least` on."""
    if type(value) is not int or value < least:
        told = f" ({macro})" if macro else ""
        raise ValueError(
            f"jobs.Setup.{name} = {value!r}: must be a whole number from {least} on{told}"
        )


def corpus_settings(setup: Setup) -> dict[str, Any]:
    """The arguments of `Setup.corpus` that the experiment decides."""
    return {
        "folder": setup.folder / "data",
        "mixture_name": setup.mixture,
        "source_length": setup.lengths["inputs"],
        "target_length": setup.lengths["targets"],
    }


def corpus(setup: Setup) -> Cache:
    """The tokenised corpus: opened if it is there, else made; made anew where the text, the
    settings or m4's format have changed and nothing was trained on it yet.

    Of several processes the first one does that, and the others open what it left.
    """
    made: list[Cache] = []

    def make() -> str:
        made.append(_corpus(setup))
        remote.push(setup.folder)
        return made[0].fingerprint

    fingerprint = distributed.on_primary_then_broadcast("the corpus", make)
    if not made:
        remote.fetch(setup.folder)
    # A copy may take longer than what comes next waits for a process.
    distributed.wait_for_all("the corpus")
    if not made:
        made.append(Cache(setup.folder / "data", setup.mixture))
        assert made[0].fingerprint == fingerprint, "MODEL_DIR is one for all"
    return made[0]


def _corpus(setup: Setup) -> Cache:
    settings = corpus_settings(setup)
    begun = [setup.folder / name for name in ("compare", "baselines")]
    if any(path.exists() for path in (remote.remote_path(setup.folder / "checkpoints"), *begun)):
        return setup.corpus(**settings)
    with contextlib.ExitStack() as stack:
        stages: list[ProgressBar] = []  # none while a cache is only opened

        def progress(name: str, done: int, total: int) -> None:
            if not stages:
                stages.append(stack.enter_context(ProgressBar("corpus", 100, "%")))
            stages[0].update(round(100 * done / max(total, 1)), name)

        made = setup.corpus(**settings, rebuild=True, report=progress)
        if not stages:
            return made
        pairs = sum(made.size(language, "train") for language in made.languages())
        text = f"{pairs:,} training pairs in {len(made.languages())} languages"
        stages[0].update(100, text)
    if made.replaced is not None:
        print(f"made anew: {made.replaced}")
    ledger = made.ledger()
    write_report_of_data(setup.folder, ledger)
    for line in ledger.summary():
        print(line)
    return made


def training_stream(setup: Setup, cache: Cache) -> Stream:
    """The batches of training, from the sampler's first rates on."""
    return make_stream(
        cache,
        setup.sampler,
        setup.sample_by,
        setup.total_steps,
        setup.stream,
        seed=setup.seed,
        batch_rows=setup.batch_size,
        source_length=setup.lengths["inputs"],
        target_length=setup.lengths["targets"],
    )


def build_model(setup: Setup, cache: Cache, **overrides: Any) -> Transformer:
    """The model for the corpus's vocabulary, rounded up to a multiple of 128 (sharding, tiles)."""
    sizes = {"vocab_size": cache.target_vocabulary.size}
    if cache.separate:
        sizes["source_vocab_size"] = cache.source_vocabulary.size
    return model_of(setup, sizes, len(cache.directions), **overrides)


def model_of(
    setup: Setup, sizes: Mapping[str, int], directions: int, **overrides: Any
) -> Transformer:
    """The model for vocabularies of these sizes (vocab_size, source_vocab_size), rounded up."""
    sizes = {name: -(-size // 128) * 128 for name, size in sizes.items()}
    return setup.model(**sizes, directions=directions, **overrides)


class _NoBatches(NamedTuple):
    """A stream that has directions and shapes, and no batches."""

    directions: list[str]
    shapes: Sequence[tuple[int, int, int]] = ()

    def batch(self, step: int, part: tuple[int, int] = (0, 1)) -> Mapping[str, np.ndarray]:
        raise AssertionError("nothing is trained")

    def fingerprint(self) -> str:
        raise AssertionError("nothing is trained")


def instead_of_training(
    setup: Setup,
    model: Transformer,
    mesh: Mesh,
    directions: Sequence[str],
    instead: Callable[[loop.Program], Any],
    shapes: Sequence[tuple[int, int, int]] = (),
) -> Any:
    """What `instead` makes of the program that training with this config would run; nothing is
    trained, read or written. shapes: (rows, source length, target length) of its batches.

    Raises:
        ValueError: sizes that do not divide over the mesh.
    """
    return setup.train(
        folder=setup.model_dir,
        model=model,
        stream=_NoBatches(list(directions), shapes),
        mesh=mesh,
        total_steps=setup.total_steps,
        seed=setup.seed,
        instead=instead,
    )


def translation_layout(
    setup: Setup,
    model: Transformer,
    directions: Sequence[str],
    devices: Sequence[Any] | None = None,
) -> Layout | None:
    """Where the model lies when it translates: over the config's mesh, as in training.

    None: the mesh is one device. Lengths are never in parts (rules for "length" are left out): a
    step of decoding has one position.

    Raises:
        ValueError: a mesh that is not possible here, a model that does not divide over it.
    """
    mesh = setup.mesh() if devices is None else setup.mesh(devices=devices)
    if mesh.size == 1:
        return None

    def layout(program: loop.Program) -> Layout:
        rules = [rule for rule in program.rules if rule[0] != "length"]
        return Layout(mesh, program.zero, rules)

    found = instead_of_training(setup, model, mesh, directions, layout)
    assert isinstance(found, Layout)
    return found


def model_folder(setup: Setup, dense: bool = False) -> Path:
    """Where a model's checkpoints and decodes are."""
    return setup.folder / "compare" / "dense" if dense else setup.folder


def prepare_process(setup: Setup) -> None:
    """Settings of the process that need MODEL_DIR."""
    set_up(setup.folder / "compilation_cache")


def console() -> Console:
    """80 columns are rich's guess where there is no terminal: too few for the tables."""
    return Console(width=None if sys.stdout.isatty() else 120)
