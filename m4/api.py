"""The Python interface of m4, as `import m4` offers it. The command line calls the same jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from m4 import config as configs
from m4.config import Config
from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.samplers import Sampler
from m4.data.samplers.temperature import temperature
from m4.data.sources import Source
from m4.data.sources.tsv import Tsv
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from m4.eval.decoding.translate import Translator
from m4.experiment import Decoding, Experiment
from m4.settings import InputError
from m4.storage import files
from m4.storage.files import read_jsonl
from m4.storage.metrics_log import read_metrics
from m4.train.initial import InitialModel

if TYPE_CHECKING:
    from m4.eval.decoding.explain import Explanation


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenized corpus in a folder.

    Attributes:
        spec: The settings that it was built with.
        cache: Its arrays, texts and vocabulary.
    """

    spec: CorpusSpec
    cache: Cache

    @property
    def languages(self) -> list[str]:
        """All languages."""
        return self.cache.languages()

    @property
    def directions(self) -> list[str]:
        """Directions, such as en-gl."""
        return self.cache.directions

    @property
    def vocabulary(self) -> Any:
        """Vocabulary that encodes sources and decodes targets."""
        return self.cache.vocabulary

    def stream(
        self, batch_size: int = 64, *, sampler: Sampler = temperature, total_steps: int = 10_000,
        seed: int = 0, sample_by: str = "examples",
    ) -> Stream:  # fmt: skip
        """Returns the training stream, whose `batch(step)` is a function of the step alone.

        The sampler's rates count `sample_by`, "examples" or "tokens". Samplers with a schedule
        need `total_steps`.
        """
        lengths = self.spec.lengths
        return mixture.make_stream(
            self.cache, sampler, sample_by, total_steps, Stream, seed=seed, batch_rows=batch_size,
            source_length=lengths["inputs"], target_length=lengths["targets"],
        )  # fmt: skip

    def batches(
        self, batch_size: int = 64, *, start: int = 0, **settings: Any
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields an endless sequence of batches from step `start` on, for any trainer.

        A batch has int32 arrays [batch_size, length] by T5X's names (encoder_input_tokens, ...).
        Other settings are those of `stream`.
        """
        stream = self.stream(batch_size, **settings)
        for step in itertools.count(start):
            yield dict(stream.batch(step))

    def ledger(self) -> Any:
        """Returns what cleaning dropped, changed and kept: an `m4.data.cleaning.ledger.Ledger`."""
        return self.cache.ledger()

    def preview(self, total_steps: int, batch_size: int = 64, **settings: Any) -> Mapping[str, Any]:
        """Returns how many pairs of each direction the stream with these settings draws."""
        from m4.data.inspection.preview import drawn_of

        stream = self.stream(batch_size, total_steps=total_steps, **settings)
        return drawn_of(self.cache, stream.examples_seen(total_steps))


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model and its files.

    Attributes:
        folder: The run's folder (MODEL_DIR).
        experiment: The experiment that it was trained with.
        config: The bindings of the experiment.
    """

    folder: Path
    experiment: Experiment
    config: Config

    def translate(
        self, lines: Sequence[str], to: str, *, source: str | None = None,
        prefix: str | Sequence[str] | None = None, n_best: int | None = None, **decoding: Any,
    ) -> list[Any]:  # fmt: skip
        """Translates lines in any language of the model; returns them in their order.

        Args:
            lines: Lines to translate.
            to: Target language.
            source: Language of the lines. Defaults to English. Only models whose gate is
                `by_direction` depend on it.
            prefix: Beginning of all translations, or one for each line. Defaults to none.
            n_best: Number of `Translations` per line. Defaults to one text per line, without score.
            decoding: Other settings of `m4.Decoding`: beams, sampling=m4.Sampling(top_p=0.9), ...

        Raises:
            InputError: The model does not translate into `to`, or a setting is wrong.
        """
        _refuse_text("lines", lines)
        if wrong := [one for one in lines if not isinstance(one, str)]:
            raise InputError(f"lines: {wrong[0]!r} is no line: must be text")
        given = decoding if n_best is None else {**decoding, "n_best": n_best}
        found = self._ready(source, given).candidates(list(lines), to, prefix=prefix)
        return found if n_best is not None else [each.texts[0] for each in found]

    def explain(
        self, line: str, to: str, *, source: str | None = None, **decoding: Any
    ) -> Explanation:
        """Translates a line, and returns its pieces, the experts of each and the attention.

        The arguments are those of `translate`. Raises InputError if `to` is not a target language.
        """
        from m4.eval.decoding.explain import explain

        return explain(self._ready(source, decoding), line, to)

    def _ready(self, source: str | None, decoding: Mapping[str, Any]) -> Translator:
        known = {one.name for one in dataclasses.fields(Decoding)}
        if unknown := [name for name in decoding if name not in known]:
            said = f"no setting of m4.Decoding{configs.near(unknown[0], known)}"
            raise InputError(f"{unknown[0]} = {decoding[unknown[0]]!r}: {said}")
        settings = dataclasses.replace(self._translator.decoding, **decoding)
        return dataclasses.replace(self._translator, decoding=settings, source=source)

    def decode(self, split: str = "test", step: int | None = None) -> dict[str, list[str]]:
        """Translates the split "test" or "dev" into decodes/; returns the texts by direction."""
        from m4.jobs.decoding.testsets import decode

        with self._opened("eval" if step is None else "steps") as experiment:
            folder = decode(experiment, split=split, step=step)
        return {
            path.name.split(".")[1]: [row["hypothesis"] for row in read_jsonl(path)]
            for path in sorted(folder.glob(f"{split}.*.jsonl"))
        }

    def evaluate(self) -> list[dict[str, Any]]:
        """Scores the test sets, translated first if needed; returns the rows of scores.jsonl."""
        from m4.jobs.decoding.evaluate import evaluate

        with self._opened("eval") as experiment:
            return read_jsonl(evaluate(experiment))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl: losses, rates and dev scores by step."""
        return read_metrics(self.folder)

    @functools.cached_property
    def params(self) -> Any:
        """Parameters to translate with, a tree of numpy arrays.

        They are the best or averaged ones if training kept such, otherwise those of the last step.
        """
        import jax

        return jax.tree.map(np.asarray, self._translator.params)

    @functools.cached_property
    def _translator(self) -> Translator:
        from m4.jobs.decoding.testsets import loaded

        with self._opened() as experiment:
            return loaded(experiment, job="m4 translate")[0]

    @contextlib.contextmanager
    def _opened(self, *writes: str) -> Iterator[Experiment]:
        from m4.jobs.open_run import open_run

        with open_run(self.experiment, self.config, *writes) as run:
            yield run.experiment


def prepare_corpus(folder: str | Path, source: Source | str | Path, **settings: Any) -> Corpus:
    """Cleans and tokenizes a corpus into a folder, or opens it if it exists (`m4 data prepare`).

    Args:
        folder: Folder or address (gs://bucket/corpora) that may hold several corpora, each under
        its fingerprint. Runs name it as `Data.data_dir`.
        source: An object of `m4.data.sources`, or a folder of <language>.train.tsv files
            (english<TAB>translation).
        settings: Settings of `m4.CorpusSpec`: languages, vocabulary_size, lengths, cleaning, ...

    Raises:
        InputError: A setting is wrong, or the text cannot be read.
    """
    from m4.jobs import corpus
    from m4.storage.local_copy import finished_folder

    made = Tsv(str(source)) if isinstance(source, str | Path) else source
    spec, place = CorpusSpec(source=made, **settings), str(folder)
    here = finished_folder(place, corpus.build_corpus(spec, place))
    assert here is not None
    cache = Cache(here, spec.mixture)
    cache.verify()
    return Corpus(spec, cache)


def load(
    folder: str | Path, *, allow_modules: Collection[str] = (), follow_links: bool = False
) -> Run:
    """Returns a trained model from its run folder.

    Reading a run imports nothing outside m4 but `allow_modules`, and runs no code of the folder.
    For a run in a bucket, `decode` and `evaluate` use its compiled programs (docs/run_folder.md).

    Args:
        folder: The run's folder or address.
        allow_modules: Modules outside m4 that its config may import, as NAME or NAME=FOLDER.
        follow_links: Whether links in the folder may lead out of it, now and later.

    Raises:
        InputError: The folder is not a run, has links that lead out of it, or its config imports a
            module that is not allowed.
    """
    from m4.storage.local_copy import fetched

    _refuse_text("allow_modules", allow_modules)
    if follow_links:
        files.follow_links(Path(folder))
    here = fetched(folder)
    saved = here / "config.gin"
    if not saved.is_file():
        raise InputError(f"{folder}: no config.gin there; train first")
    config = configs.load([saved], model_dir=folder, allowed_modules=allow_modules)
    return Run(here, config.experiment(), config)


def delta(run: Run | str | Path) -> list[dict[str, Any]]:
    """Returns the ΔBLEU of a run against its bilingual baselines; trains nothing.

    Each row is one direction, system and metric, with the 95% interval of the difference by paired
    bootstrap.

    Raises:
        InputError: Translations or baselines are missing, or the config names no baselines.
    """
    from m4.jobs.bilingual import baselines_of
    from m4.jobs.decoding.report import report

    run = run if isinstance(run, Run) else load(run)
    with run._opened("eval") as experiment:
        baselines_of(experiment)
        written = report(experiment).deltas
        return [] if written is None else read_jsonl(written)


def plot_delta(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Plots rows of `delta` against the size of the training data (GShard, figure 6).

    Args:
        rows: Rows of `delta`. Only those of the first metric are drawn.
        path: File to write: .png or .svg.
    """
    from m4.eval.report.figures import save
    from m4.eval.report.plot import figure
    from m4.eval.scoring.delta import from_plain

    try:
        deltas = from_plain(map(dict, rows))
    except (KeyError, TypeError) as error:
        raise InputError(f"plot_delta: rows must be those of `delta` ({error})") from error
    save(figure([row for row in deltas if row.metric == deltas[0].metric]), [Path(path)])
    return Path(path)


def config_of(
    experiment: Experiment | str | Path, model_dir: str | Path | None, bindings: Collection[str],
    init_from: str | Path | None,
) -> Config:  # fmt: skip
    """Returns the config of an experiment, or of a gin file with further bindings."""
    _refuse_text("bindings", bindings)
    given = [*bindings]
    if isinstance(experiment, Experiment):
        if given:
            raise InputError(f"bindings = {given}: an Experiment has its settings already")
        if model_dir is not None:
            experiment = dataclasses.replace(experiment, model_dir=str(model_dir))
        if init_from is not None:
            begun = dataclasses.replace(experiment.training, initial=InitialModel(str(init_from)))
            experiment = dataclasses.replace(experiment, training=begun)
        return configs.of_experiment(experiment)
    if init_from is not None:
        given.append(f"INITIAL_CHECKPOINT_PATH = {str(init_from)!r}")
    return configs.load([experiment], given, model_dir=model_dir)


def _refuse_text(name: str, given: Collection[str]) -> None:
    if isinstance(given, str):
        raise InputError(f"{name} = {given!r}: must be a list of texts: [{given!r}]")
