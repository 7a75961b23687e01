"""`m4 watch`: shows a training run from its files, here or in a bucket. It locks nothing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from m4.jobs import command, streams
from m4.settings import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from m4.train.measuring.watchdog import Heartbeat

EXAMPLE = "m4 watch --model_dir=gs://bucket/run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    command.add_run_folder(parser)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="between two looks (default: 10)"
    )
    parser.add_argument("--once", action="store_true", help="show it once")


def run(arguments: argparse.Namespace) -> int:
    """Shows a run until it has ended; returns the exit status."""
    streams.require_output()
    watch(command.run_of(arguments), arguments.seconds, once=arguments.once)
    return 0


_sleep = time.sleep
_FILES = ("run.json", "metrics.jsonl", "heartbeat.json", "scores.jsonl",
          "scores_by_step.jsonl")  # fmt: skip
# Of scores.jsonl: system, metric, subset, score.
_Score = tuple[str, str, str, float]


class Status(NamedTuple):
    """What the files say now; None or empty: they do not say it yet.

    rows: of metrics.jsonl. checkpoint: the latest step. scores: of scores.jsonl; by_step: rows of
    scores_by_step.jsonl.
    """

    total_steps: int | None
    rows: list[dict[str, Any]]
    heartbeat: Heartbeat | None
    checkpoint: int | None
    scores: list[_Score]
    by_step: list[dict[str, Any]]

    @property
    def step(self) -> int:
        """The last step that is known."""
        beats = [self.heartbeat.step] if self.heartbeat is not None else []
        return max([row["step"] for row in self.rows[-2:]] + beats, default=0)

    def latest(self, name: str) -> float | None:
        """The last value of a metric."""
        return next((row[name] for row in self.rows[::-1] if row.get(name) is not None), None)


def read_status(folder: Path) -> Status:
    """Of a run's folder as it is here. ValueError: it is none."""
    from m4.eval.scoring import by_step
    from m4.storage import run_folder
    from m4.storage.checkpoints import SCORES_BY_STEP
    from m4.storage.files import read_jsonl
    from m4.storage.metrics_log import read_metrics
    from m4.storage.steps import latest_step
    from m4.train.measuring.watchdog import heartbeat

    config = run_folder.read(folder)["config"]
    total = config.get("experiment.Training.total_steps", "")
    scores = folder / "scores.jsonl"
    return Status(
        int(total) if total.isdecimal() else None,
        read_metrics(folder),
        heartbeat(folder),
        latest_step(folder / "checkpoints"),
        read_jsonl(scores, _score) if scores.is_file() else [],
        by_step.read_rows(folder / SCORES_BY_STEP),
    )


def _score(row: Mapping[str, Any]) -> _Score:
    return row["system"], row["metric"], row["subset"], float(row["score"])


def lines(status: Status, now: float) -> list[tuple[str, str]]:
    """(What, what it is), for people; now: `time.time`."""
    from m4.eval.scoring.levels import LEVELS

    found = [("step", _step(status)), ("job", _job(status, now))]
    losses = [("nll", status.latest("nll"))]
    losses += [(level, status.latest(f"nll/{level}")) for level in LEVELS]
    losses.append(("dev", status.latest("dev/nll")))
    found.append(("loss", _joined(losses, "{:.3f}")))
    speed = [
        _one("tokens/s", status.latest("tokens_per_second"), "{:,.0f}"),
        _one("MFU", status.latest("mfu"), "{:.1%}"),
        _one("goodput", status.latest("goodput"), "{:.1%}"),
        _one("waiting for data", status.latest("data_wait_seconds"), "{:.3g} s a step"),
    ]
    found.append(("speed", " · ".join(part for part in speed if part)))
    experts = [
        _one("slots used", status.latest("expert_usage"), "{:.0%}"),
        _one("left behind", status.latest("fraction_tokens_left_behind"), "{:.1%} of the tokens"),
        _one("dead", status.latest("dead_experts"), "{:.3g} a layer"),
    ]
    found.append(("experts", " · ".join(part for part in experts if part)))
    if status.checkpoint is not None:
        found.append(("checkpoint", f"step {status.checkpoint}"))
    found.append(("scores", _scores(status.scores)))
    found.append(("by step", _last_by_step(status.by_step)))
    return [(name, text) for name, text in found if text]


def _step(status: Status) -> str:
    total, seconds = status.total_steps, status.latest("step_seconds")
    if total is None:
        return f"{status.step:,}"
    left = max(total - status.step, 0)
    text = f"{status.step:,} of {total:,}"
    if seconds is not None and left:
        text += f" · {seconds:.3g} s a step · {_duration(left * seconds)} of steps left"
    return text


def _job(status: Status, now: float) -> str:
    beat = status.heartbeat
    if beat is None:
        return "no heartbeat: not training yet, or not by this version"
    age = max(now - beat.time, 0.0)
    if beat.phase == "end":
        return f"ended {_duration(age)} ago"
    if beat.silent(now):
        return f"NO SIGN OF LIFE for {_duration(age)} (phase {beat.phase})"
    return f"running: {beat.phase} ({age:.0f} s ago)"


def _scores(rows: Sequence[_Score]) -> str:
    """The means over directions of each system."""
    found: dict[tuple[str, str], list[float]] = {}
    for system, metric, subset, score in rows:
        if subset == "all":
            found.setdefault((system, metric), []).append(score)
    parts = [f"{system} {metric} {fmean(each):.1f}" for (system, metric), each in found.items()]
    return " · ".join(parts)


def _last_by_step(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last scores of `m4 eval --watch`, of each split that it scored."""
    from m4.eval.scoring import by_step

    splits: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        splits.setdefault(row["split"], []).append(row)
    return "; ".join(
        by_step.said(each, max(row["step"] for row in each)) for each in splits.values()
    )


def _one(name: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{name} {form.format(value)}"


def _joined(values: Sequence[tuple[str, float | None]], form: str) -> str:
    return " · ".join(text for name, value in values if (text := _one(name, value, form)))


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours:,} h {rest // 60} min"
    return f"{rest // 60} min" if rest >= 60 else f"{rest} s"


def watch(
    model_dir: str, seconds: float = 10.0, *, once: bool = False, stream: TextIO | None = None
) -> None:
    """Shows a run until it has ended or Ctrl-C: a table on a terminal; elsewhere a line whenever
    something has changed.

    Args:
        seconds: between two looks. once: show it once.

    Raises:
        ValueError: no run's folder.
    """
    from rich.console import Console
    from rich.live import Live

    if not seconds > 0:
        raise InputError(f"--seconds={seconds}: must be above 0")
    console = Console(file=stream or sys.stdout)
    if not console.is_terminal or once:
        for status in _looks(model_dir, seconds, once):
            said = lines(status, time.time())
            console.print(" | ".join(f"{n}: {text}" for n, text in said), soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        for status in _looks(model_dir, seconds, once, every=True):  # how long ago things were
            live.update(_table(model_dir, lines(status, time.time())), refresh=True)


def _looks(model_dir: str, seconds: float, once: bool, *, every: bool = False) -> Iterator[Status]:
    """The status on every look, or whenever something but the heartbeat's time has changed."""
    from m4.storage import remote

    folder, before = remote.local(model_dir), None
    while True:
        remote.fetch(folder, _FILES.__contains__)
        status = read_status(folder)
        beat = status.heartbeat
        silent = beat is not None and beat.silent(time.time())
        finished = status.total_steps is not None and status.step >= status.total_steps
        ended = beat.phase == "end" if beat is not None else finished
        key = (status._replace(heartbeat=None), silent, ended)
        if every or key != before:
            before = key
            yield status
        if once or ended:
            return
        _sleep(seconds)


def _table(title: str, said: Sequence[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("run", title)
    for name, text in said:
        table.add_row(name, text)
    return table
