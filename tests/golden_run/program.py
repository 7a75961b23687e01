"""The parts of m4 that the golden run imports: the command line, and the stream of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import m4
from m4.build import build
from m4.cli.main import main as main
from m4.jobs.corpus import open_corpus


def batch_of(folder: Path) -> Callable[[int], Mapping[str, np.ndarray]]:
    """Returns the function from a training step to its batch, of the run in `folder`."""
    experiment = m4.load(folder).experiment
    return build(experiment, open_corpus(experiment)).stream.batch
