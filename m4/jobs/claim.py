"""A job at work in a run's folder: one at a time, for one config, which the folder keeps."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from m4.config import Config
from m4.experiment import Experiment
from m4.jobs import prepare
from m4.parallel import distributed
from m4.storage import remote, run_folder


@contextmanager
def claimed(experiment: Experiment, config: Config, *, fresh: bool = False) -> Iterator[Path]:
    """Locks MODEL_DIR, makes it this config's own and writes config.gin and operative_config.gin.

    fresh: what is there is removed (only if it is a run's folder).

    Raises:
        ValueError: another job is at work there; the folder belongs to another config.
    """
    folder = prepare.run_folder(experiment)
    with remote.locked(folder):
        run_folder.claim(
            folder,
            config.settings,
            config.text(),
            mutable=config.mutable,
            modules=config.modules,
            fresh=fresh,
        )
        run_folder.write_operative(folder, config.operative_text())
        yield folder


@contextmanager
def claimed_together(
    experiment: Experiment, config: Config, *, fresh: bool = False
) -> Iterator[Path]:
    """`claimed` by the primary of several processes; the others check that they see its folder."""
    folder = prepare.run_folder(experiment)
    with ExitStack() as stack:

        def claim() -> str:
            stack.enter_context(claimed(experiment, config, fresh=fresh))
            return run_folder.digest(folder)

        run_folder.check_shared(folder, distributed.on_primary_then_broadcast("MODEL_DIR", claim))
        prepare.prepare_process(experiment)
        yield folder
