"""The table of docs/results.md: a row per experiment, from its experiment.toml and means."""

from collections.abc import Sequence
from pathlib import Path

from m4.eval.scoring.delta import BILINGUAL, METRIC_NAMES, Average
from m4.settings import InputError
from m4.storage.files import read_jsonl
from scripts.results import ablations, curves, kept, page, speedrun, starts, zero_shot

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def with_table(text: str, folders: Sequence[Path]) -> str:
    """Returns the page with the current table. Raises InputError if its marks are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"docs/results.md: no {BEGIN} and {END}")
    head = ["", "claim", "paper", "here", "verdict"]
    lines = [_line(folder) for folder in folders]
    rules = "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * 5, *lines])
    return f"{before}{BEGIN}\n{rules}\n{END}{after}"


def _line(folder: Path) -> list[str]:
    asked = kept.asked(folder)
    link = f"[{asked.number}](../results/{folder.name}/README.md)"
    return [link, asked.claim, asked.paper, _here(folder), f"**{asked.verdict}**"]


def _here(folder: Path) -> str:
    """Returns the curves' finding and each system's mean ΔBLEU over all languages."""
    if runs := ablations.read(folder, kept.asked(folder)):
        return ablations.here(runs, kept.asked(folder))
    if found := speedrun.read(folder, kept.asked(folder)):
        return speedrun.here(found, kept.asked(folder))
    if rows := starts.read(folder):
        return starts.here(rows)
    if untrained := zero_shot.read(folder):
        return zero_shot.here(untrained)
    path = folder / "means.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    wanted = {"metric": "bleu", "level": "all", "baseline": BILINGUAL}
    means = [Average(**{key: row[key] for key in row.keys() - {"metric", "baseline"}})
             for row in rows if wanted.items() <= row.items()]  # fmt: skip
    deltas = [f"{mean.system} {page.difference(mean)}" for mean in means]
    said = f"Mean Δ{METRIC_NAMES['bleu']} against {BILINGUAL} models: {', '.join(deltas)}."
    found, asked = curves.read(folder), kept.asked(folder).curves
    parts = [said if deltas else "", curves.here(found, asked) if found else ""]
    return " ".join(filter(None, parts[::-1] if "folder" in asked else parts)) or page.NOT_YET
