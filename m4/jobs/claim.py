"""A job at work in a run's folder, which belongs to one config: one job at a time for each kind of
files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from m4.config import Config
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.parallel import distributed
from m4.settings import InputError
from m4.storage import remote, run_folder
from m4.storage.checkpoints import Checkpoints
from m4.storage.lease import Busy


@contextmanager
def claimed(
    experiment: Experiment,
    config: Config,
    *kinds: str,
    fresh: bool = False,
) -> Iterator[Path]:
    """Locks the files of these kinds in MODEL_DIR and makes the folder this config's.

    config.gin and operative_config.gin are written by training, and by other jobs while none
    trains there; then they only check them.

    fresh: what is there is removed (only if it is a run's folder).

    A job that is refused before it wrote anything leaves the config of before: else a value that
    cannot be used would be refused for good.

    Raises:
        ValueError: another such job is at work there; the folder belongs to another config, or
            cannot be used.
    """
    folder = prepare.run_folder(experiment)
    others = {"train", *(run_folder.KINDS if fresh else ())} - {*kinds}
    with run_folder.locked(folder, *kinds):
        before = run_folder.contents(folder)
        try:
            with run_folder.locked(folder, *sorted(others), wait=False):
                run_folder.claim(
                    folder,
                    config.settings,
                    config.text(),
                    mutable=config.mutable,
                    modules=config.modules,
                    fresh=fresh,
                )
                run_folder.write_operative(folder, config.operative_text())
        except Busy:
            if fresh:
                raise
            run_folder.check(folder, config.settings, config.mutable)
        claimed_as = run_folder.contents(folder)
        try:
            yield folder
        except InputError:
            unchanged = run_folder.contents(folder) == claimed_as
            if unchanged and not fresh:
                run_folder.put_back(folder, before)
            raise


@contextmanager
def claimed_together(
    experiment: Experiment,
    config: Config,
    *kinds: str,
    fresh: bool = False,
) -> Iterator[Path]:
    """`claimed` by the primary of several processes; the others check that they see its folder."""
    folder = prepare.run_folder(experiment)
    with ExitStack() as stack:

        def claim() -> str:
            stack.enter_context(claimed(experiment, config, *kinds, fresh=fresh))
            return run_folder.digest(folder)

        run_folder.check_shared(folder, distributed.on_primary_then_broadcast("MODEL_DIR", claim))
        prepare.prepare_process(experiment, kinds[0])
        if remote.is_working_copy(folder):
            # What orbax cannot open ends the job here, and not after the corpus is built.
            Checkpoints(folder / "checkpoints", read_only=True).close()
        yield folder
