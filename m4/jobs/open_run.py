"""The door to a run: a command opens its run once, and then works in a plain local folder.

Only this module handles whether MODEL_DIR is in a bucket, another job writes there, or the folder
belongs to this config.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from m4.config import Config
from m4.experiment import Experiment
from m4.parallel import distributed
from m4.parallel.platform.jax_setup import check_accelerator, set_up
from m4.settings import InputError
from m4.storage import local_copy, run_folder
from m4.storage.checkpoints import Checkpoints
from m4.storage.files import check_tree, write_text
from m4.storage.local_copy import LocalCopy
from m4.storage.locks import Busy, local_lock
from m4.storage.objects import check_place, is_address
from m4.storage.steps import latest_step


class Run(NamedTuple):
    """An open run."""

    experiment: Experiment  # its MODEL_DIR is a local folder
    folder: Path
    address: str  # MODEL_DIR as given by the user
    modules: Mapping[str, str]  # modules outside m4 that its config imports -> their folders


@contextlib.contextmanager
def open_run(
    experiment: Experiment, config: Config, *writes: str, fresh: bool = False, computes: bool = True
) -> Iterator[Run]:
    """Opens a run for one command.

    The folder must belong to the config. Training makes it so, and so do jobs that prepare an
    untrained run; settings that others override make a trial (`m4.jobs.decoding.testsets`). For a
    run in a bucket, a local copy is updated, and what the command writes is uploaded. The primary
    process does all that, and the others check that they see its folder.

    Args:
        writes: Kinds of files that the command writes (`run_folder.KINDS`). Only one job at a time
            writes files of a kind. Without kinds, the run is only read.
        fresh: Whether to remove first what jobs wrote there.
        computes: Whether the command runs programs on the devices.
    """
    address = experiment.model_dir.rstrip("/")
    check_place(address)
    bucket = is_address(address)
    if computes:
        check_accelerator()
        if writes:  # an impossible mesh is refused before anything is written
            experiment.training.mesh()
            distributed.check_joined()
    with contextlib.ExitStack() as stack:
        folder = Path(address)
        if not writes:
            folder = local_copy.fetched(address)
            run_folder.check(folder, config.settings, config.mutable)
        elif distributed.is_primary():
            folder = local_copy.copy_of(address, "-".join(writes)) if bucket else folder
            check_tree(folder)
        if bucket:
            stack.enter_context(_named(folder, address))
        if writes:

            def enter() -> str:
                stack.enter_context(_owned(folder, address, experiment, config, writes, fresh))
                return run_folder.digest(folder)

            written = distributed.on_primary_then_broadcast("MODEL_DIR", enter)
            if bucket and not distributed.is_primary():
                folder = local_copy.fetched(address)
            run_folder.check_shared(folder, written, address)
        if computes:
            set_up(_programs(folder, address, writes))
        if bucket and writes and computes:  # checkpoints that orbax cannot open end the job here
            Checkpoints(folder / "checkpoints", read_only=True).close()
        yield Run(located(experiment, folder), folder, experiment.model_dir, config.modules)


def located(experiment: Experiment, folder: Path | None = None) -> Experiment:
    """Returns the experiment with a local folder as MODEL_DIR."""
    address, data = experiment.model_dir.rstrip("/"), experiment.data
    if not is_address(address):
        return experiment
    folder = local_copy.copy_of(address) if folder is None else folder
    data = dataclasses.replace(data, data_dir=data.data_dir or f"{address}/data")
    return dataclasses.replace(experiment, model_dir=str(folder), data=data)


@contextlib.contextmanager
def _named(folder: Path, address: str) -> Iterator[None]:
    """Makes errors name the address that the user gave, not the local copy."""
    try:
        yield
    except InputError as error:
        error.args = tuple(str(one).replace(str(folder), address) for one in error.args)
        raise


@contextlib.contextmanager
def _owned(
    folder: Path, address: str, experiment: Experiment, config: Config, writes: tuple[str, ...],
    fresh: bool,
) -> Iterator[None]:  # fmt: skip
    """Locks the kinds of files, and claims the folder for the config or checks that it fits."""
    where = f"MODEL_DIR = {address}"
    copy = LocalCopy(address, writes, run_folder.kind_of, where) if is_address(address) else None
    others = sorted({"train", *(run_folder.KINDS if fresh else ())} - {*writes})

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        """Holds the additional locks for writing the config's files."""
        with contextlib.ExitStack() as stack:
            for kind in others:
                if copy is None:
                    stack.enter_context(local_lock(folder / f".lock.{kind}", where))
                else:
                    copy.lock(stack, kind, wait=False)
            yield
            if copy is not None:
                copy.push(run_folder.CONFIG_FILES)

    with contextlib.ExitStack() as stack:
        if copy is not None:
            stack.enter_context(copy.locked())
        claims = fresh or "train" in writes
        claims |= {"data", "baselines"} >= {*writes} and not run_folder.has_work(folder)
        if not claims:
            run_folder.check(folder, config.settings, config.mutable)
        for kind in writes if copy is None else ():
            stack.enter_context(local_lock(folder / f".lock.{kind}", where))
        before, latest = run_folder.config_files(folder), latest_step(folder / "checkpoints")
        if claims:
            try:
                with alone():
                    if fresh:
                        removed = run_folder.start_over(folder)
                        if copy is not None:
                            copy.clear(removed)
                    texts = {"config.gin": config.text()}
                    texts["operative_config.gin"] = config.operative_text()
                    run_folder.claim(
                        folder, config.settings, config.mutable, config.modules, texts,
                        experiment.decoding.translated(),
                    )  # fmt: skip
            except Busy:
                if fresh:
                    raise
                run_folder.check(folder, config.settings, config.mutable)
        elif trial := experiment.decoding.trial(run_folder.decoding_of(folder)):
            # Rows of scores name it.
            name = f"decodes/{trial}/operative_config.gin"
            write_text(folder / name, config.operative_text())
            if copy is not None:
                copy.push([name])
        try:
            yield
        except InputError:  # without a new checkpoint, the folder gets its record back
            if claims and before and not fresh and latest_step(folder / "checkpoints") == latest:
                with contextlib.suppress(Busy), alone():
                    run_folder.restore(folder, before)
            raise


def _programs(folder: Path, address: str, writes: tuple[str, ...]) -> Path | None:
    """Returns the run's folder of compiled programs, or None for the user's own."""
    # Jobs that write to a run in a bucket keep their programs there for other machines. Programs in
    # a folder on disk may be anybody's, and are never run.
    if not writes or not is_address(address):
        return None
    if distributed.is_primary():
        return folder / local_copy.COMPILED / writes[0]
    kept = f"{local_copy.COMPILED}/{writes[0]}"
    return local_copy.fetched(address, lambda name: name.startswith(f"{kept}/")) / kept
