"""m4 from Python: what `import m4` offers. The command line calls the same jobs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

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
from m4.eval.decoding.decode import Translations
from m4.experiment import Experiment
from m4.settings import InputError, SettingError
from m4.storage.files import read_jsonl
from m4.storage.metrics_log import read_metrics


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenized corpus in a folder; `cache` has its arrays, `spec` what it was built from."""

    spec: CorpusSpec
    cache: Cache

    @property
    def languages(self) -> list[str]:
        return self.cache.languages()

    @property
    def directions(self) -> list[str]:
        return self.cache.directions

    @property
    def vocabulary(self) -> Any:
        """Encodes sources and decodes targets: text <-> ids."""
        return self.cache.vocabulary

    def stream(
        self,
        batch_size: int = 64,
        *,
        sampler: Sampler = temperature,
        total_steps: int = 10_000,
        seed: int = 0,
        sample_by: str = "examples",
    ) -> Stream:
        """The training stream: `stream.batch(step)` is a function of the step alone.

        batch_size: packed rows. total_steps: that samplers with a plan are made for.
        """
        lengths = self.spec.lengths
        return mixture.make_stream(
            self.cache,
            sampler,
            sample_by,
            total_steps,
            Stream,
            seed=seed,
            batch_rows=batch_size,
            source_length=lengths["inputs"],
            target_length=lengths["targets"],
        )

    def batches(
        self, batch_size: int = 64, *, start: int = 0, **settings: Any
    ) -> Iterator[dict[str, np.ndarray]]:
        """Batches without end from step `start`, for any trainer: int32 [batch_size, length] arrays
        by the field's standard names (encoder_input_tokens, ...). settings: of `stream`."""
        stream = self.stream(batch_size, **settings)
        for step in itertools.count(start):
            yield dict(stream.batch(step))

    def ledger(self) -> Any:
        """Returns what cleaning dropped, changed and kept: an `m4.data.cleaning.ledger.Ledger`."""
        return self.cache.ledger()

    def preview(self, total_steps: int, batch_size: int = 64, **settings: Any) -> Mapping[str, Any]:
        """Direction -> pairs drawn in `total_steps`, of the training stream with these settings."""
        from m4.data.inspection.preview import drawn_of

        stream = self.stream(batch_size, total_steps=total_steps, **settings)
        return drawn_of(self.cache, stream, total_steps)


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model and its files.

    Attributes:
        folder: MODEL_DIR. experiment: what it was trained with. config: the same as bindings.
    """

    folder: Path
    experiment: Experiment
    config: Config

    @overload
    def translate(
        self, lines: Sequence[str], to: str, *, prefix: str | Sequence[str] | None = ...,
        n_best: None = ..., **decoding: Any,
    ) -> list[str]: ...  # fmt: skip

    @overload
    def translate(
        self, lines: Sequence[str], to: str, *, prefix: str | Sequence[str] | None = ...,
        n_best: int, **decoding: Any,
    ) -> list[Translations]: ...  # fmt: skip

    def translate(
        self,
        lines: Sequence[str],
        to: str,
        *,
        prefix: str | Sequence[str] | None = None,
        n_best: int | None = None,
        **decoding: Any,
    ) -> list[str] | list[Translations]:
        """Lines in any language of the model -> lines in the language `to`, in their order.

        Args:
            prefix: what the translations begin with, or that of each line.
            n_best: so many translations of each line, with their scores; None: a text each.
            decoding: other settings of `m4.Decoding`: beams, sampling=m4.Sampling(top_p=0.9), ...

        Raises:
            ValueError: the model does not translate into `to`. SettingError: a setting that cannot
                be.
        """
        if isinstance(lines, str):
            raise InputError(f"lines = {lines!r}: must be a list of lines, [{lines!r}]")
        given = decoding if n_best is None else {**decoding, "n_best": n_best}
        settings = dataclasses.replace(self._translator.decoding, **given)
        ready = dataclasses.replace(self._translator, decoding=settings)
        found = ready.candidates(list(lines), to, prefix=prefix)
        return found if n_best is not None else [each.texts[0] for each in found]

    def decode(self, split: str = "test", step: int | None = None) -> dict[str, list[str]]:
        """Direction -> translations of a split ("test" or "dev"); written to decodes/ too."""
        from m4.jobs.claim import claimed_together
        from m4.jobs.decoding.testsets import decode

        with claimed_together(self.experiment, self.config, "eval" if step is None else "steps"):
            folder = decode(self.experiment, split=split, step=step)
        return {
            path.name.split(".")[1]: [row["hypothesis"] for row in read_jsonl(path)]
            for path in sorted(folder.glob(f"{split}.*.jsonl"))
        }

    def evaluate(self) -> list[dict[str, Any]]:
        """The rows of scores.jsonl: every system, direction, metric and subset; translates first
        if needed."""
        from m4.jobs.claim import claimed_together
        from m4.jobs.decoding.evaluate import evaluate

        with claimed_together(self.experiment, self.config, "eval"):
            return read_jsonl(evaluate(self.experiment))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: losses, rates and dev scores by step."""
        return read_metrics(self.folder)

    @functools.cached_property
    def params(self) -> Any:
        """The parameters to use, a tree of numpy arrays: the best or averaged ones where training
        kept such, else those of the last step."""
        import jax

        return jax.tree.map(np.asarray, self._translator.params)

    @functools.cached_property
    def _translator(self) -> Any:
        from m4.jobs.decoding.ready_model import translator

        return translator(self.experiment)


def prepare_corpus(
    folder: str | Path, source: Source | str | Path, *, rebuild: bool = False, **settings: Any
) -> Corpus:
    """Cleans and tokenizes a corpus into `folder`, or opens what is there; `m4 data prepare` does
    the same. One job at a time builds in a folder.

    Args:
        folder: or an address, gs://bucket/corpus; for runs it is `Data.data_dir`.
        source: an object of `m4.data.sources`, or a folder of <language>.train.tsv files
            (english<TAB>translation).
        settings: of `m4.CorpusSpec`: languages, vocabulary_size, lengths, cleaning, ...

    Raises:
        SettingError: a setting that cannot be. ValueError: text that cannot be read.
    """
    from m4.jobs import corpus

    made = Tsv(str(source)) if isinstance(source, str | Path) else source
    spec, place = CorpusSpec(source=made, **settings), str(folder)
    cache = corpus.build_corpus(spec, place, rebuild=rebuild)
    corpus.fetched(place, corpus.everything)
    return Corpus(spec, cache)


def train(
    experiment: Experiment | str | Path,
    *,
    model_dir: str | Path | None = None,
    bindings: Collection[str] = (),
    fresh: bool = False,
) -> Run:
    """Trains an experiment, or the one of a gin file, from its latest checkpoint.

    Args:
        model_dir: the run's folder, in place of the experiment's own.
        bindings: of a gin file: "TRAIN_STEPS = 100".
        fresh: remove what is in the run's folder and start over.

    Raises:
        SettingError: a setting that cannot be. ValueError: the folder belongs to another config.
    """
    from m4.jobs.claim import claimed_together
    from m4.jobs.train import train as job

    config = _config(experiment, model_dir, bindings)
    found = config.experiment()
    with claimed_together(found, config, "train", fresh=fresh) as folder:
        try:
            job(found)
        except SettingError as error:
            raise InputError(config.explain(error)) from error
    return Run(folder, found, config)


def load(folder: str | Path, *, allow_modules: Collection[str] = ()) -> Run:
    """A trained model from its run folder.

    Reading a run imports nothing outside m4 but `allow_modules`, and runs no code of the folder; of
    one in a bucket `decode` and `evaluate` run its compiled programs (docs/run_folder.md).

    Raises:
        ValueError: no run's folder; its config names a module that is not allowed.
    """
    from m4.storage import remote

    _refuse_text("allow_modules", allow_modules)
    here = remote.local(str(folder))
    remote.fetch(here)
    saved = here / "config.gin"
    if not saved.is_file():
        raise InputError(f"{folder}: no config.gin there; train first")
    config = configs.load([saved], model_dir=folder, allowed_modules=allow_modules)
    return Run(here, config.experiment(), config)


def delta(run: Run | str | Path) -> list[dict[str, Any]]:
    """ΔBLEU of a run against its bilingual baselines: a row a direction and system, with the 95%
    interval of the difference by paired bootstrap. It trains nothing.

    Raises:
        ValueError: translations or baselines are missing, or the config names no baselines; what
            to do.
    """
    from m4.jobs.bilingual.baselines import baselines_of
    from m4.jobs.claim import claimed_together
    from m4.jobs.decoding.report import report

    run = run if isinstance(run, Run) else load(run)
    with claimed_together(run.experiment, run.config, "eval"):
        baselines_of(run.experiment)
        written = report(run.experiment).deltas
        return [] if written is None else read_jsonl(written)


def plot_delta(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draws rows of `delta` over the size of the training data (GShard, figure 6): .png, .pdf or
    .svg."""
    from m4.eval.report.plot import plot
    from m4.eval.scoring.delta import from_plain

    try:
        deltas = from_plain(map(dict, rows))
    except (KeyError, TypeError) as error:
        raise InputError(f"plot_delta: rows must be those of `delta` ({error})") from error
    plot(deltas, [Path(path)])
    return Path(path)


def _config(
    experiment: Experiment | str | Path, model_dir: str | Path | None, bindings: Collection[str]
) -> Config:
    _refuse_text("bindings", bindings)
    given = [*bindings]
    if isinstance(experiment, Experiment):
        if given:
            raise InputError(f"bindings = {given}: an Experiment has its settings already")
        if model_dir is not None:
            experiment = dataclasses.replace(experiment, model_dir=str(model_dir))
        return configs.of_experiment(experiment)
    return configs.load([experiment], given, model_dir=model_dir)


def _refuse_text(name: str, given: Collection[str]) -> None:
    """A text is a collection of letters, too."""
    if isinstance(given, str):
        raise InputError(f"{name} = {given!r}: must be a list of texts: [{given!r}]")
