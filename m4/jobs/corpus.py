"""Opening or building the corpus of an experiment, and the files that each job needs of it.

The corpus is `<fingerprint>/` in MODEL_DIR/data, or in `Data.data_dir`, which runs may share
(`m4.data.corpus`). From a bucket, a process downloads only the files that its job reads.
"""

import functools
import math
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from m4.data.beam import TEXT
from m4.data.cache.cache import Cache, differences, fingerprint_of
from m4.data.cache.corpus_text import Progress
from m4.data.cache.shards import Damaged
from m4.data.corpus import CorpusSpec
from m4.data.inspection.cleaning_report import english_variants, write_report
from m4.experiment import Experiment
from m4.parallel import distributed
from m4.progress import ProgressBar
from m4.settings import InputError, SavedText, counted
from m4.storage.files import remove, whole
from m4.storage.local_copy import BoundedCopy, finished_folder, local_place, upload_finished
from m4.storage.objects import is_address
from m4.storage.run_folder import VOCABULARY
from m4.storage.steps import latest_step

# Tests whether a job reads a file, by its name in the corpus's folder.
Needs = Callable[[str], bool]
# Builds a corpus in a folder (`CorpusSpec.build`).
Build = Callable[..., Any]


def settings(name: str) -> bool:
    """Tests for the manifest and the vocabularies."""
    return name.startswith(("manifest.", "vocabulary."))


def arrays(name: str) -> bool:
    """Tests for a file that training reads."""
    return not name.startswith(("text/", "data_report."))


def is_shard(name: str) -> bool:
    """Tests for training arrays, which are fetched from a bucket when their pairs are drawn."""
    return name.startswith("train.") and name.endswith(".npy")


def test_sets(name: str) -> bool:
    """Tests for a file that decoding and scoring read."""
    return settings(name) or name.startswith(("text/dev.", "text/test.", "dev.pairs", "test.pairs"))


def place_of(experiment: Experiment) -> str:
    """Returns the folder or address of the experiment's corpora."""
    return experiment.data.data_dir or f"{experiment.model_dir.rstrip('/')}/data"


def open_corpus(experiment: Experiment, needs: Needs = lambda name: True) -> Cache:
    """Returns the tokenized corpus, which the primary process builds if it does not exist."""
    place = place_of(experiment)
    fingerprint = built(experiment)
    bounded = is_address(place) and needs is arrays
    now: Needs = (lambda name: arrays(name) and not is_shard(name)) if bounded else needs
    folder = finished_folder(place, fingerprint, now)
    # A copy may take longer than the next collective waits for a process.
    distributed.wait_for_all("the corpus")
    if folder is None:
        raise InputError(
            f"data_dir = {place}: {socket.gethostname()} does not see there what process 0 opened; "
            "it must be one folder that all processes share, or an address"
        )
    cache = Cache(folder, experiment.data.corpus.mixture)
    cache.verify(now)
    if bounded:
        address, files = f"{place.rstrip('/')}/{fingerprint}", cache.manifest["files"]
        shards = {name: one for name, one in files.items() if is_shard(name)}
        cache.bounded = BoundedCopy(address, folder, shards, experiment.data.disk_gigabytes)
    return cache


def open_vocabulary(experiment: Experiment) -> Cache:
    """Returns the languages and vocabularies of the model's corpus, kept in MODEL_DIR."""
    cache = Cache(Path(experiment.model_dir) / VOCABULARY, experiment.data.corpus.mixture)
    cache.verify(settings)
    return cache


@distributed.by_primary("the vocabulary")
def keep_vocabulary(experiment: Experiment, cache: Cache) -> None:
    """Copies the corpus's manifest and vocabularies into MODEL_DIR, for `open_vocabulary`."""
    run = Path(experiment.model_dir)
    folder = run / VOCABULARY
    if (folder / "manifest.json").is_file():
        kept = Cache(folder)
        if kept.fingerprint == cache.fingerprint:
            return
        if latest_step(run / "checkpoints") is not None:
            changed = differences(kept.manifest["identity"], cache.manifest["identity"])
            raise InputError(
                f"MODEL_DIR = {run}: the model there was trained with another corpus "
                f"({'; '.join(changed[:3])}); give another MODEL_DIR, or start over with --fresh"
            )
    for path in [*cache.folder.glob("vocabulary.*model"), cache.folder / "manifest.json"]:
        with whole(folder / path.name) as part:
            shutil.copyfile(path, part)


def build_corpus(spec: CorpusSpec, place: str, build: Build | None = None) -> str:
    """Returns the fingerprint of a corpus; `build` makes it in the place unless it exists."""
    identity = spec.identity()
    fingerprint = fingerprint_of(identity)
    if finished_folder(place, fingerprint, settings) is not None:
        return fingerprint
    if isinstance(place, SavedText):
        raise InputError(
            f"data_dir = {place}: the corpus is not there, and a saved config names no folder to "
            "write to; give it on the command line (--gin.experiment.Data.data_dir=...)"
        )
    folder = local_place(place)
    build = functools.partial(build or spec.build, folder, identity=identity)
    try:  # a machine whose upload was cut off has it here
        build()
    except Damaged:  # a machine may have downloaded a part of it before it was removed there
        remove(folder / fingerprint)
        build()
    upload_finished(place, fingerprint)
    return fingerprint


@distributed.by_primary("the corpus")
def built(experiment: Experiment, build: Build | None = None) -> str:
    """Returns the fingerprint of the experiment's corpus; building it shows a progress bar."""
    data = experiment.data
    build = functools.partial(_shown, build or data.corpus.build, untrained=data.untrained)
    return build_corpus(data.corpus, place_of(experiment), build)


def _shown(build: Build, folder: Path, **more: Any) -> None:
    """Builds a corpus, prints what cleaning drops, and writes data_report.* next to it."""
    with ProgressBar("corpus", 100, "%") as bar:
        cache = build(folder, progress=_progress(bar), **more)
        bar.update(100, size_of(cache))
    ledger = cache.ledger()
    write_report(cache.folder, ledger)
    for line in [*ledger.summary(), *english_variants(ledger)]:
        print(line)


def size_of(cache: Cache) -> str:
    """Returns the size of a corpus as text."""
    names = cache.language_pairs()
    pairs = sum(cache.size(name, "train") for name in names)
    return f"{counted(pairs, 'training pair')} in {counted(len(names), 'pair')} of languages"


def _progress(bar: ProgressBar) -> Progress:
    """Returns a callback that shows the stage of a build."""
    stage, start, first = "", 0.0, 0

    def progress(name: str, done: int, total: int) -> None:
        nonlocal stage, start, first
        if name != stage:  # what others did in between, or before a restart, is no part of a rate
            stage, start, first = name, time.monotonic(), done
        seconds = time.monotonic() - start
        rate = ""
        if name.startswith(("tokens", TEXT)) and seconds > 1:
            rate = f" {done / 1e6:,.1f} MB, {(done - first) / seconds / 1e6:,.2f} MB/s"
        # The time left is of this stage: that of the others is unknown.
        left = seconds * (total - done) / (done - first) if done > first else math.nan
        bar.update(round(100 * done / max(total, 1)), f"{name}{rate}", left=left)

    return progress
