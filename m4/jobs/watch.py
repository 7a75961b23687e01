"""`m4 watch`: shows a training run from its files, here or in a bucket. It locks nothing."""

import argparse
import time
from collections.abc import Mapping, Sequence
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
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="between two looks (default: 10)"
    )
    parser.add_argument("--once", action="store_true", help="show it once")


def run(arguments: argparse.Namespace) -> None:
    """Shows a run until it has ended."""
    streams.require_output()
    watch(command.run_of(arguments), arguments.seconds, once=arguments.once)


def watch(
    model_dir: str, seconds: float = 10.0, *, once: bool = False, stream: TextIO | None = None
) -> None:
    """Shows a run until it has ended, or until Ctrl-C: a line whenever something has changed."""
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
    """The state of a run, from its files."""

    lines: dict[str, str]  # name -> text, for people
    ended: bool  # whether training has ended
    changes: tuple[Any, ...]  # all but the heartbeat's age: a new line is due when it differs


def look_at(folder: Path, now: float) -> Look:
    """Reads a run's local folder."""
    from m4.eval.scoring import by_step
    from m4.eval.scoring.levels import LEVELS
    from m4.eval.scoring.score import read_scores
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
    curve = by_step.read_rows(folder / "scores_by_step.jsonl")
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
        "scores": _means(score_rows),
        "by step": [_last_scores(curve)],
    }
    joined = {name: " · ".join(filter(None, parts)) for name, parts in lines.items()}
    changes = (len(rows), checkpoint, score_rows, curve, silent, ended)
    return Look({name: text for name, text in joined.items() if text}, ended, changes)


def _means(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns each system's mean over directions, by metric."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["subset"] == "all":
            found.setdefault((row["system"], row["metric"]), []).append(row["score"])
    return [f"{system} {metric} {fmean(each):.1f}" for (system, metric), each in found.items()]


def _last_scores(curve: Sequence[Mapping[str, Any]]) -> str:
    """Returns the last scores of `m4 eval --watch`, for each split that it scored."""
    from m4.eval.scoring.by_step import said

    splits: dict[str, list[Mapping[str, Any]]] = {}
    for row in curve:
        splits.setdefault(row["split"], []).append(row)
    return "; ".join(said(each, max(row["step"] for row in each)) for each in splits.values())


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(max(seconds, 0)), 3600)
    if hours:
        return f"{hours:,} h {rest // 60} min"
    return f"{rest // 60} min" if rest >= 60 else f"{rest} s"
