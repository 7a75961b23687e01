"""The corpus of an experiment: where it is, opened or built, and what of it each job needs.

MODEL_DIR/data, or `Data.data_dir`, which several runs share. In an object store it has a working
separate copy (`m4.storage.remote`), so that a run's copy never carries it: a process downloads
only what its job reads.
"""

import contextlib
import itertools
import math
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from m4.data.cache.cache import Cache, Damaged
from m4.data.cache.corpus_text import Progress
from m4.data.cleaning.ledger import LEDGER_FILE
from m4.data.corpus import CorpusSpec
from m4.data.inspection.cleaning_report import english_variants, write_report
from m4.experiment import Experiment, SavedFolder
from m4.parallel import distributed
from m4.progress import ProgressBar
from m4.settings import InputError
from m4.storage import remote, run_folder
from m4.storage.files import whole
from m4.storage.lease import Busy
from m4.storage.store import open_store

# Which of a corpus's files a job reads, by their names in its folder.
Needs = Callable[[str], bool]

_FILES = re.compile(
    r"ledger\.json|data_report\.\w+|vocabulary\.[\w.]*model|token_counts\.[\w.]*npy|"
    r"(train|dev|test)\.[\w.]+\.npy|text/(train|dev|test)\.\w+\.(tsv|origin|subsets\.json)"
)
_WAIT_SECONDS, _sleep = 5.0, time.sleep


def settings(name: str) -> bool:
    """What it was made of, and the vocabularies."""
    return name.startswith(("manifest.", "vocabulary.", "."))


def arrays(name: str) -> bool:
    """What training reads: rows are read in any order, so each process needs all of them."""
    return not name.startswith(("text/", "data_report.", LEDGER_FILE))


def test_sets(name: str) -> bool:
    """What decoding and scoring read."""
    return settings(name) or name.startswith(("text/dev.", "text/test."))


def everything(_name: str) -> bool:
    return True


def place_of(experiment: Experiment) -> str:
    """The corpus's folder or address."""
    return experiment.data.data_dir or f"{experiment.model_dir.rstrip('/')}/data"


def fetched(place: str, needs: Needs) -> Path:
    """The corpus's folder; of one in an object store a working copy with what is needed."""
    folder = remote.local(place)
    remote.fetch(folder, needs)
    return folder


def open_corpus(experiment: Experiment, needs: Needs = everything) -> Cache:
    """The tokenized corpus: opened if it is there, else built.

    MODEL_DIR/data is rebuilt where the text, the settings or m4's format have changed and no model
    was trained on it yet; a shared corpus never. With several processes the primary opens or builds
    it; then all download what they need, at the same time.

    Raises:
        ValueError: the folder holds another corpus.
    """
    place = place_of(experiment)
    fingerprint = distributed.on_primary_then_broadcast(
        "the corpus", lambda: opened_or_built(experiment).fingerprint
    )
    folder = fetched(place, needs)
    # A copy may take longer than what comes next waits for a process.
    distributed.wait_for_all("the corpus")
    if not (folder / "manifest.json").is_file():
        raise InputError(
            f"data_dir = {place}: {socket.gethostname()} does not see there what process 0 opened; "
            "it must be one folder that all processes share, or an address"
        )
    cache = Cache(folder, experiment.data.corpus.mixture)
    if cache.fingerprint != fingerprint:
        raise InputError(
            f"data_dir = {place}: {socket.gethostname()} has another corpus there than process 0 "
            f"({cache.fingerprint[:12]} here, {fingerprint[:12]} there)"
        )
    cache.verify(needs)
    return cache


def open_vocabulary(experiment: Experiment) -> Cache:
    """Opens the corpus's languages and vocabularies alone, which MODEL_DIR keeps: data_dir need not
    be there."""
    folder = remote.local(experiment.model_dir) / run_folder.VOCABULARY
    if not (folder / "manifest.json").is_file():  # a run of an earlier version
        folder = fetched(place_of(experiment), settings)
    cache = Cache(folder, experiment.data.corpus.mixture)
    cache.verify(settings)
    return cache


def keep_vocabulary(experiment: Experiment, cache: Cache) -> None:
    """Copies the corpus's languages and vocabularies into MODEL_DIR, for `open_vocabulary`.

    Raises:
        ValueError: the model there was trained with another vocabulary.
    """
    run = remote.local(experiment.model_dir)
    folder = run / run_folder.VOCABULARY
    if (folder / "manifest.json").is_file():
        kept = Cache(folder)
        if kept.fingerprint == cache.fingerprint:
            return
        if _begun(run) and kept.vocabulary.fingerprint != cache.vocabulary.fingerprint:
            raise InputError(
                f"data_dir = {place_of(experiment)}: its vocabulary is not the one that the model "
                f"in {remote.shown(run)} was trained with; give that model's data_dir, or start "
                "over with --fresh"
            )
    for path in [*cache.folder.glob("vocabulary.*model"), cache.folder / "manifest.json"]:
        with whole(folder / path.name) as part:
            shutil.copyfile(path, part)


def build_corpus(
    spec: CorpusSpec,
    place: str,
    *,
    rebuild: bool | None = None,
    built: Callable[[Cache], None] = lambda _: None,
    progress: Progress | None = None,
) -> Cache:
    """The corpus in a folder, or at an address: opened if it is there, else built.

    One job at a time builds there; others wait for it. What a killed one left is removed.

    Args:
        rebuild: replace another corpus; None: as the spec says.
        built: called with a corpus that was built just now; what it writes into the folder is
            uploaded too. progress(stage, done, total): see `CorpusSpec.build`.

    Raises:
        ValueError: the folder holds another corpus and `rebuild` is False; see `CorpusSpec.build`.
    """
    saved = isinstance(place, SavedFolder)
    rebuild = (spec.rebuild if rebuild is None else rebuild) and not saved
    folder = fetched(place, settings)
    # In a store the manifest comes last: without it an upload was interrupted.
    there = not remote.is_remote(place) or open_store(place).stat("manifest.json") is not None
    if there and (found := _opened(spec, place, folder, rebuild)):
        return found
    if saved:
        raise InputError(
            f"data_dir = {place}: no corpus there, and a saved config names no folder to write to; "
            "give it on the command line (--gin.experiment.Data.data_dir=...)"
        )
    with _locked(folder, place):
        if found := _opened(spec, place, folder, rebuild):
            return found  # of the job that this one waited for, or now uploaded to its end
        if remote.is_remote(place):
            open_store(place).delete("manifest.json")
            _remove_half(folder)
        try:
            return spec.build(
                folder, rebuild=rebuild, progress=progress, built=built, verified=_here(folder)
            )
        except InputError as error:
            raise _other_corpus(place, folder, error) from error


def _opened(spec: CorpusSpec, place: str, folder: Path, rebuild: bool) -> Cache | None:
    """The corpus; None: there is none, or another one that may be replaced."""
    if not (folder / "manifest.json").is_file():
        return None
    try:
        return spec.build(folder, rebuild=False, verified=_here(folder))
    except InputError as error:
        if rebuild:
            return None
        raise _other_corpus(place, folder, error) from error


def _here(folder: Path) -> Needs:
    """Of a working copy little has been downloaded yet: `open_corpus` compares what it needs."""
    return settings if remote.is_working_copy(folder) else everything


def _remove_half(folder: Path) -> None:
    """Removes what an interrupted upload left. Other files stay, and are refused."""
    if not (folder / "manifest.json").is_file():
        paths = [path for path in folder.rglob("[!.]*") if path.is_file()]
        if all(_FILES.fullmatch(path.relative_to(folder).as_posix()) for path in paths):
            for path in paths:
                path.unlink()
            with contextlib.suppress(FileNotFoundError):
                (folder / "text").rmdir()


@contextlib.contextmanager
def _locked(folder: Path, place: str) -> Iterator[None]:
    """`remote.locked`, when the job that builds there has ended."""
    with contextlib.ExitStack() as stack:
        for look in itertools.count():
            try:
                stack.enter_context(remote.locked(folder, "data_dir"))
                break
            except Busy as error:
                if look == 0:
                    print(f"{error}; waiting for its corpus", file=sys.stderr)
            _sleep(_WAIT_SECONDS)
        yield


def _other_corpus(place: str, folder: Path, error: InputError) -> InputError:
    said = str(error)
    if isinstance(error, Damaged):
        return error
    if not said.startswith(f"{folder}: "):
        return error  # of the text, not of the folder
    said = said.removeprefix(f"{folder}: ").partition(" (")[0]
    return _OtherCorpus(f"data_dir = {place}: {said}")


class _OtherCorpus(InputError):
    """The folder holds another corpus. found: which."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(
            f"{found}; give another data_dir, or replace it for all its runs with "
            "m4 data prepare --rebuild"
        )


def opened_or_built(experiment: Experiment, *, rebuild: bool = False) -> Cache:
    """The experiment's corpus, by one process alone, with a bar. What cleaning left out of one that
    is built is printed, and in data_report.html next to it.

    rebuild: replaces another one even where it is shared, or a model was trained on it.
    """
    run, own = remote.local(experiment.model_dir), experiment.data.data_dir is None
    rebuild = rebuild or (own and not _begun(run))
    spec = experiment.data.corpus
    with contextlib.ExitStack() as stack:
        bars: list[ProgressBar] = []  # none while a cache is only opened
        stages: dict[str, tuple[float, int]] = {}

        def progress(name: str, done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(ProgressBar("corpus", 100, "%")))
            start, first = stages.setdefault(name, (time.monotonic(), done))
            seconds = time.monotonic() - start
            rate = ""
            if name == "tokens" and seconds > 1:
                rate = f" {done:,} pairs, {(done - first) / seconds:,.0f} pairs/s"
            # Of this stage: how long the others take is not known.
            left = seconds * (total - done) / (done - first) if done > first else math.nan
            bars[0].update(round(100 * done / max(total, 1)), f"{name}{rate}", left=left)

        def built(cache: Cache) -> None:
            pairs = sum(cache.size(language, "train") for language in cache.languages())
            text = f"{pairs:,} training pairs in {len(cache.languages())} languages"
            bars[0].update(100, text)
            stack.close()
            if cache.replaced is not None:
                print(f"rebuilt: {cache.replaced}")
            ledger = cache.ledger()
            write_report(cache.folder, ledger)
            for line in [*ledger.summary(), *english_variants(ledger)]:
                print(line)

        try:
            return build_corpus(
                spec,
                place_of(experiment),
                rebuild=rebuild or None,
                built=built,
                progress=progress,
            )
        except _OtherCorpus as error:
            if not own:
                raise
            raise InputError(
                f"{error.found}; choose another MODEL_DIR, where --init_from continues from this "
                "one, or start over with --fresh"
            ) from error


def _begun(run: Path) -> bool:
    """Tells whether a model was trained in the run's folder."""
    checkpoints = remote.remote_path(run / "checkpoints")
    return checkpoints.exists() or any((run / name).exists() for name in ("compare", "baselines"))
