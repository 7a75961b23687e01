"""Commands that read a run: they write nothing in its folder, and may work while it is trained."""

import argparse
import functools
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from m4.cli import environment
from m4.settings import InputError

if TYPE_CHECKING:
    from m4.config import Config
    from m4.eval.decoding.testsets import Portion
    from m4.experiment import Experiment
    from m4.jobs.decoding.text import Request


def local_folder(model_dir: str) -> Path:
    """Where a model's files are to be read: of one in an object store the working copy."""
    from m4.storage import remote

    folder = remote.local(model_dir)
    remote.fetch(folder)
    return folder


def translate(experiment: "Experiment", config: "Config", parsed: argparse.Namespace) -> int:
    from m4.eval.decoding.translate import first_text, json_line
    from m4.jobs import prepare
    from m4.jobs.translate import translator
    from m4.storage import run_folder

    if not parsed.text and "stdin" in environment.closed:
        raise InputError("standard input is closed, and there is no text among the arguments")
    environment.open_standard_output()
    run_folder.check(local_folder(experiment.model_dir), config.settings, config.kinds)
    prepare.prepare_process(experiment, None)
    ready = translator(experiment)
    written = functools.partial(json_line, to=parsed.to) if parsed.json else first_text
    if not gc.isenabled():  # `main`
        gc.freeze()  # all this stays
        gc.enable()
    if parsed.text:
        found = ready.candidates(parsed.text, parsed.to)
        for line, each in zip(parsed.text, found, strict=True):
            print(written(line, each), flush=True)
    else:
        ready.stream(sys.stdin.fileno(), parsed.to, sys.stdout, written=written)
    return 0


def score_files(experiment: "Experiment", config: "Config", parsed: argparse.Namespace) -> int:
    """`m4 score` of a user's files: a line of JSON a pair; the run's folder is only read."""
    import json

    from m4.jobs import prepare
    from m4.jobs.decoding import score
    from m4.parallel import distributed
    from m4.storage import run_folder

    if distributed.is_distributed():
        raise InputError("one process scores files; several can share `m4 score` of a test set")
    if not all((parsed.source, parsed.target, parsed.to)):
        raise InputError("give --source, --target and --to together")
    for name in ("split", "step", "compare"):
        if getattr(parsed, name) is not None:
            raise InputError(f"--{name}: not with --source, which the latest model scores")
    environment.open_standard_output()
    run_folder.check(local_folder(experiment.model_dir), config.settings, config.kinds)
    prepare.prepare_process(experiment, None)
    for row in score.score_files(experiment, parsed.source, parsed.target, parsed.to):
        print(json.dumps(row, ensure_ascii=False), flush=True)
    return 0


def decode_text(
    experiment: "Experiment", config: "Config", step: int | None, request: "Request"
) -> int:
    """`m4 decode --input`: the run is read only, and may be trained meanwhile."""
    from m4.jobs import prepare
    from m4.jobs.decoding import text
    from m4.storage import run_folder

    if "-" in request.inputs and "stdin" in environment.closed:
        raise InputError("--input=-: standard input is closed")
    if request.output == "-":
        environment.open_standard_output()
    run_folder.check(local_folder(experiment.model_dir), config.settings, config.kinds)
    prepare.prepare_process(experiment, None)
    text.decode_text(experiment, request, step)
    return 0


def audit(experiment: "Experiment", config: "Config", step: int | None, portion: "Portion") -> int:
    """`m4 decode --audit`: the run is read only."""
    from m4.jobs import prepare
    from m4.jobs.decoding import audit as job
    from m4.storage import run_folder

    run_folder.check(local_folder(experiment.model_dir), config.settings, config.kinds)
    prepare.prepare_process(experiment, None)
    return 1 if job.audit(experiment, portion, step) else 0
