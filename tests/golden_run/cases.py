"""The runs, and the processes that make them.

A process has a fixed environment, so that pytest's own, and the machine's, change no number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.xla_flags import QUICK

ROOT = Path(__file__).parents[2]
_CONFIGS = "tests/golden_run/configs"
# On any number of cores, sums are made in one order.
_ONE_ORDER = "--xla_cpu_multi_thread_eigen=false"
_SECONDS = 1500
# "batches": case -> name -> hash; "values": key -> case -> name -> hash or numbers.
Recorded = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A run: its config in configs/, steps, CPU devices, and bindings on top.

    Attributes:
        evaluate: Translates and scores the test sets after training.
        full: The config with its own sizes, compiled as m4 compiles for users.
    """

    config: str
    steps: int
    devices: int = 1
    bindings: Mapping[str, Any] | None = None
    evaluate: bool = False
    full: bool = False
    processes: int = 1

    def words(self, folder: Path) -> list[str]:
        """Returns the arguments of `m4 train` for this run in `folder`."""
        given = {"TRAIN_STEPS": self.steps, "schedules.rsqrt.hold_steps": 580}
        given |= self.bindings or {}
        config = f"--gin_file={_CONFIGS}/{self.config}.gin"
        bindings = (f"--gin.{name}={value}" for name, value in given.items())
        return [config, f"--model_dir={folder}", *bindings]


def _dispatch(name: str, **mesh: int) -> Case:
    sizes = {f"mesh.make_mesh.{axis}": size for axis, size in mesh.items()}
    return Case("dispatch", 2, 8, {"moe.MoeLayer.dispatch": f"@{name}.{name}", **sizes})


CASES = {
    "demo": Case("demo", 6, evaluate=True),
    "tatoeba": Case("tatoeba", 4, evaluate=True),
    "two_processes": Case(
        "dispatch", 3, 2, {"mesh.make_mesh.data": 1, "mesh.make_mesh.expert": 4}, processes=2
    ),
    "einsum": _dispatch("einsum", data=2, expert=4),
    "gather": _dispatch("gather", data=8),
    "dropless": _dispatch("dropless", data=8),
    "ragged": _dispatch("ragged", data=8),
    "all_to_all": _dispatch("all_to_all", fsdp=2, expert=4),
    "hierarchical_all_to_all": _dispatch("hierarchical_all_to_all", data=2, node=2, expert=2),
}
FULL = {
    "demo_40": Case("demo_40", 40, evaluate=True, full=True),
    "tatoeba_20": Case("tatoeba_20", 20, evaluate=True, full=True),
}


def run(names: Sequence[str], folder: Path) -> Recorded:
    """Makes the runs in `folder`; returns {"batches": {name: ...}, "values": {key: {name: ...}}}.

    Runs of one kind share a process, so that JAX is imported once.

    Raises:
        RuntimeError: A process failed; the message has its output.
    """
    every = {**CASES, **FULL}
    several = [name for name in names if every[name].processes > 1]
    for name in several:
        _run(_together(every[name], folder / name), folder / f"{name}.log", every[name].devices)
    kinds: dict[tuple[int, bool], list[str]] = {(1, False): several} if several else {}
    for name in names:
        if name not in several:
            kinds.setdefault((every[name].devices, every[name].full), []).append(name)
    found: Recorded = {"batches": {}, "values": {}}
    for (devices, full), together in kinds.items():
        output = folder / f"{together[0]}.json"
        command = [sys.executable, "-m", "tests.golden_run.cases", str(output), *together]
        _run([command], output.with_suffix(".log"), devices, full=full)
        made = json.loads(output.read_text(encoding="utf-8"))
        found["batches"].update(made["batches"])
        found["values"].setdefault(made["key"], {}).update(made["values"])
    return found


def _together(case: Case, folder: Path) -> list[list[str]]:
    """Returns the command of each process of a run in several."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "m4", "train", *case.words(folder)]
    command += [f"--coordinator_address=127.0.0.1:{port}", f"--process_count={case.processes}"]
    return [[*command, f"--process_index={index}"] for index in range(case.processes)]


def _run(commands: Sequence[Sequence[str]], log: Path, devices: int, full: bool = False) -> None:
    """Runs commands at the same time; none of the processes is left behind.

    Raises:
        RuntimeError: A process failed; the message has what all of them printed.
    """
    # Without compiled bytecode each process would compile all that it imports.
    dropped = ("JAX_", "XLA_", "M4_", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    environment = {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "NPROC": "32",  # XLA's threads: with fewer than devices, collectives wait for each other
        "XLA_FLAGS": _ONE_ORDER if full else f"{QUICK} {_ONE_ORDER}",
    }
    started: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as out:
            for command in commands:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
                    cwd=ROOT, start_new_session=True,
                )  # fmt: skip
                started.append(process)
        statuses = [one.wait(_SECONDS) for one in started]
        if any(statuses):
            said = log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{commands}: exit statuses {statuses}\n{said}")
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def _in_this_process(output: Path, names: Sequence[str]) -> None:
    """Makes runs next to `output` on two cores, and writes their hashes there."""
    if sys.platform == "linux":  # before XLA makes its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    from m4.cli.main import main
    from tests.golden_run import reading

    every = {**CASES, **FULL}
    found: dict[str, Any] = {"batches": {}, "values": {}}
    for name in names:
        case, folder = every[name], output.parent / name
        status = 0
        if case.processes == 1:  # else it is there
            status = main(["train", *case.words(folder)])
        if status == 0 and case.evaluate:
            status = main(["eval", f"--model_dir={folder}"])
        if status != 0:
            sys.exit(status)
        found["batches"][name] = reading.batches(folder, case.steps)
        found["values"][name] = reading.values(folder)
    found["key"] = reading.key()
    output.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _in_this_process(Path(sys.argv[1]), sys.argv[2:])
