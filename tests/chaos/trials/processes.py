"""One of two processes of a training job lost: the other one ends, and the job resumes."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import sys
import time

from tests.chaos.forks import in_child
from tests.chaos.trial import Trial, bad_end, changed, said
from tests.chaos.world import World, arguments

_HEARTBEAT_SECONDS = 5
_MOST_SECONDS = 300.0


def undisturbed(world: World) -> World:
    """The same, with what two processes make when none is lost: not bit for bit what one makes."""
    world.begin("begun")
    ended = in_child(lambda: _together(world, None), most_seconds=_MOST_SECONDS)
    assert ended.status == 0, ended.err
    return dataclasses.replace(world, result={"train": world.found("train")})


def lose(world: World, draw: random.Random) -> Trial:
    """kill -9 of one of two processes; the other one must end by itself with status 1; then both
    are started again. world: `undisturbed`."""
    world.begin("begun")
    which, share = draw.randrange(2), draw.random()
    rows = draw.randrange(6)  # of metrics before the kill
    detail = f"process {which} after {rows} rows of metrics and {share:.2f} s"

    def trial(verdict: str, text: str) -> Trial:
        return Trial(
            "one of two processes lost", f"process {which}", detail, verdict, text, "begun"
        )

    ended = in_child(lambda: _together(world, (which, rows, share)), most_seconds=_MOST_SECONDS)
    if (bad := bad_end(ended)) is not None or ended.status != 0:
        return trial(bad or "lost", said(ended))
    text = ended.err.strip().splitlines()[-1] if ended.err.strip() else ""
    ended = in_child(lambda: _together(world, None), most_seconds=_MOST_SECONDS)
    if (bad := bad_end(ended)) is not None or ended.status != 0:
        return trial(bad or "lost", said(ended))
    other = changed(world, "train")
    return trial("silent" if other else "survived", ", ".join(other[:4]) or text)


def _together(world: World, lost: tuple[int, int, float] | None) -> int:
    """Both processes; 0: they ended as they should."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [_started(world, port, index) for index in (0, 1)]
    if lost is not None:
        which, rows, seconds = lost
        while _rows(world) < rows:
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(processes[which], signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in processes]
    wanted = [[0, 0]]
    if lost is not None:  # 0: it had done its work
        wanted = [[-9, 1], [-9, 0]] if lost[0] == 0 else [[1, -9], [0, -9]]
    if statuses in [*wanted, [0, 0]]:
        return 0
    print(f"statuses {statuses}", file=sys.stderr)
    return 1


def _rows(world: World) -> int:
    path = world.run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _started(world: World, port: int, index: int) -> int:
    child = os.fork()
    if child:
        return child
    os.environ["NPROC"] = "32"
    os.environ["GLIBC_TUNABLES"] = ""  # as if it were the program that restarts itself
    sys.argv = [
        "m4",
        *arguments("train", world.run),
        f"--coordinator_address=127.0.0.1:{port}",
        "--process_count=2",
        f"--process_index={index}",
        f"--heartbeat_seconds={_HEARTBEAT_SECONDS}",
    ]
    from m4.cli.main import main

    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
