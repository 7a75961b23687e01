"""`m4 watch`: shows a training run from its files, local or in a bucket, without locks."""

import argparse
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TextIO

from m4.jobs import command, streams
from m4.settings import InputError

EXAMPLE = "m4 watch gs://bucket/run"
_sleep = time.sleep
_FILES = ("run.json", "metrics.jsonl", "heartbeat.json", "scores.jsonl", "scores_by_step.jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_run_folder(parser)
    text = "seconds between updates (default: 10)"
    parser.add_argument("--seconds", type=float, default=10.0, help=text)
    parser.add_argument("--once", action="store_true", help="show the state once and exit")


def run(arguments: argparse.Namespace) -> None:
    """Shows a run until training has ended."""
    streams.require_output()
    watch(command.run_of(arguments), arguments.seconds, once=arguments.once)


def watch(
    model_dir: str, seconds: float = 10.0, *, once: bool = False, stream: TextIO | None = None
) -> None:
    """Prints a line whenever a run has changed, until it has ended or Ctrl-C."""
    from m4.storage.local_copy import fetched

    if not seconds > 0:
        raise InputError(f"--seconds={seconds}: must be above 0")
    console, before = streams.console(stream), None
    while True:
        look = look_at(fetched(model_dir, _FILES.__contains__), time.time())
        if look.changes != before:
            said = " | ".join(f"{name}: {text}" for name, text in look.lines.items())
            console.print(said, soft_wrap=True)
        if once or look.ended:
            return
        before = look.changes
        _sleep(seconds)


class Look(NamedTuple):
    """State of a run, read from its files."""

    lines: dict[str, str]  # name -> text
    ended: bool  # whether training has ended
    changes: tuple[Any, ...]  # everything but the heartbeat's age: a change makes a new line


def look_at(folder: Path, now: float) -> Look:
    """Reads the state of a run from its local folder."""
    from m4.eval.scoring.levels import LEVELS
    from m4.eval.scoring.score import read_by_step, read_scores, said_by_step
    from m4.storage import run_folder
    from m4.storage.metrics_log import read_metrics
    from m4.storage.steps import latest_step
    from m4.train.measuring.watchdog import ENDS, heartbeat

    config = run_folder.read(folder)["config"]
    total = run_folder.whole_setting(folder, config, "experiment.Training.total_steps") or 0
    rows, beat = read_metrics(folder), heartbeat(folder)
    checkpoint = latest_step(folder / "checkpoints")
    step = max([row["step"] for row in rows[-2:]] + ([beat.step] if beat else []), default=0)
    scores = folder / "scores.jsonl"
    score_rows = read_scores(scores) if scores.is_file() else []
    curve = read_by_step(folder / "scores_by_step.jsonl")
    means = _grouped((row for row in score_rows if row["subset"] == "all"), "system", "metric")
    silent = beat is not None and beat.silent(now)
    finished = beat.phase == "end" if beat is not None else 0 < total <= step
    ended = finished or (beat is not None and beat.phase in ENDS)

    def latest(said: str, name: str, form: str) -> str:
        value = next((row[name] for row in rows[::-1] if row.get(name) is not None), None)
        return "" if value is None else f"{said} {form.format(value)}"

    if beat is None:
        job = "no heartbeat: not training yet, or not by this version"
    elif ended:
        early = "stopped early, " if finished and step < total else ""
        job = f"{early}{'ended' if finished else beat.phase} {_duration(now - beat.time)} ago"
    elif silent:
        job = f"NO SIGN OF LIFE for {_duration(now - beat.time)} (phase {beat.phase})"
    else:
        job = f"running: {beat.phase} ({max(now - beat.time, 0.0):.0f} s ago)"
    speed = next((row["step_seconds"] for row in rows[::-1] if row.get("step_seconds")), None)
    left = 0 if finished else max(total - step, 0)
    lines = {
        "step": [
            f"{step:,} of {total:,}" if total else f"{step:,}",
            f"{speed:.3g} s a step" if speed and left else "",
            f"{_duration(left * speed)} of steps left" if speed and left else "",
        ],
        "job": [job],
        "loss": [
            latest("nll", "nll", "{:.3f}"),
            *(latest(level, f"nll/{level}", "{:.3f}") for level in LEVELS),
            latest("dev", "dev/nll", "{:.3f}"),
        ],
        "speed": [
            latest("tokens/s", "tokens_per_second", "{:,.0f}"),
            latest("MFU", "mfu", "{:.1%}"),
            latest("goodput", "goodput", "{:.1%}"),
            latest("waiting for data", "data_wait_seconds", "{:.3g} s a step"),
        ],
        "experts": [
            latest("slots used", "expert_usage", "{:.0%}"),
            latest("left behind", "fraction_tokens_left_behind", "{:.1%} of the tokens"),
            latest("dead", "dead_experts", "{:.3g} a layer"),
        ],
        "checkpoint": [f"step {checkpoint}" if checkpoint is not None else ""],
        # Each system's mean over directions, and the last scores of `m4 eval --watch`.
        "scores": [f"{system} {metric} {fmean(row['score'] for row in each):.1f}"
                   for (system, metric), each in means.items()],
        "by step": ["; ".join(said_by_step(each, max(row["step"] for row in each))
                              for each in _grouped(curve, "split").values())],
    }  # fmt: skip
    joined = {name: " · ".join(filter(None, parts)) for name, parts in lines.items()}
    changes = (len(rows), checkpoint, score_rows, curve, silent, ended)
    return Look({name: text for name, text in joined.items() if text}, ended, changes)


def _grouped(rows: Iterable[Mapping[str, Any]], *names: str) -> dict[Any, list[Any]]:
    """Returns the rows grouped by their values under these names."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(max(seconds, 0)), 3600)
    if hours:
        return f"{hours:,} h {rest // 60} min"
    return f"{rest // 60} min" if rest >= 60 else f"{rest} s"
