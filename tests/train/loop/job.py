"""`m4 train`, or another command, in several processes, for tests."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.command_line import TINY

# Metrics at every step. Four heads for four devices.
COMMON = [
    f"--gin_file={TINY}", "--gin.experiment.Training.log_period=1",
    "--gin.experiment.Training.checkpoint_period=2", "--gin.experiment.Training.dev_period=1000",
    "--gin.transformer.Transformer.heads=4", "--gin.transformer.Transformer.head_width=4",
]  # fmt: skip
FOR_EVER = "--gin.TRAIN_STEPS=100000"
HEARTBEAT_SECONDS = 5


class Job:
    """Command in `count` processes of `devices` devices each."""

    def __init__(
        self, log: Path, count: int, devices: int, *arguments: str,
        words: Sequence[str] = ("train", *COMMON), each: Sequence[str] = (),
        homes: Sequence[Path] = (),
    ):  # fmt: skip
        """Starts them all.

        Args:
            words: The command and what all processes are told.
            each: One more argument for each process. Defaults to none.
            homes: Folders in which each process keeps its copies. Defaults to one for all.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "JAX_NUM_CPU_DEVICES": str(devices),
            # XLA's threads: with fewer than there are devices, collectives can wait for each other.
            "NPROC": "32",
        }
        self.logs = [log.with_name(f"{log.name}.{index}") for index in range(count)]
        self.processes = []
        for index, path in enumerate(self.logs):
            command = [
                *(sys.executable, "-m", "m4", *words),
                *(f"--coordinator_address=127.0.0.1:{port}", f"--process_count={count}"),
                *(f"--process_index={index}", f"--heartbeat_seconds={HEARTBEAT_SECONDS}"),
                *arguments,  # which may name another address or count
                *each[index : index + 1],
            ]
            if homes:
                environment["XDG_CACHE_HOME"] = str(homes[index])
            with path.open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment
                    )
                )

    def statuses(self, seconds: float) -> list[int]:
        """Waits until all processes have ended, and returns their exit statuses."""
        until = time.monotonic() + seconds
        return [one.wait(max(until - time.monotonic(), 0.1)) for one in self.processes]

    def said(self) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in self.logs]

    def wait_for(self, done: Callable[[], bool], seconds: float, every: float = 0.1) -> None:
        until = time.monotonic() + seconds
        while not done():
            ended = [one.poll() for one in self.processes if one.poll() is not None]
            assert not ended, (ended, self.said())
            assert time.monotonic() < until, self.said()
            time.sleep(every)


@contextmanager
def started(job: Job) -> Iterator[Job]:
    """Ends the processes of the job after the block, whatever happens in it."""
    try:
        yield job
    finally:
        for one in job.processes:
            one.kill()
            one.wait()
