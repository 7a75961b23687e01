"""An experiment's README.md: its claim, its results, and how they were made."""

import numpy as np

from m4.eval.scoring.delta import (
    BILINGUAL,
    METRIC_NAMES,
    UNDERTRAINED,
    Average,
    small_tests,
    small_tests_line,
)
from m4.eval.scoring.levels import LEVELS
from m4.eval.scoring.rates import RATES, notes, shown, summary
from m4.eval.scoring.score import COPY
from scripts.results import ablations, curves, extraction, speedrun, starts, zero_shot
from scripts.results.found import Compared, Found
from scripts.results.tables import signed, table

NOT_YET = "not yet measured"


def text(found: Found) -> str:
    """Returns the page. The same numbers give the same text."""
    asked = found.asked
    verdict, *reasons = asked.why.strip().split("\n\n")
    parts = [
        f"# {asked.number}: {asked.title}",
        "<!-- Drawn by `make results` from the files of this folder; words: experiment.toml -->",
        f"- **Claim.** {asked.claim}\n"
        f"- **The paper** ({asked.paper}). {asked.paper_result}\n"
        f"- **Here.** {here(found)}\n"
        f"- **Verdict: {asked.verdict}.** {verdict}\n"
        f"- **State.** {state(found)}",
        *(["## Why", *reasons] if reasons else []),
    ]
    losses = curves.sections(found.curves, asked.curves) if found.curves else []
    if first := "folder" in asked.curves:
        parts += losses
    bilingual = [one for one in found.compared if one.baseline == BILINGUAL]
    if found.ablation:
        parts += ablations.sections(found.ablation, asked)
    elif found.speedrun:
        parts += speedrun.sections(found.speedrun, asked)
    elif found.starts:
        parts += starts.sections(asked.folder, asked, found.starts, found.sizes)
    elif asked.extraction:
        parts += extraction.sections(asked)
    elif found.zero_shot:
        parts += zero_shot.sections(asked, found.zero_shot)
    elif bilingual:
        parts += [
            "![Differences from the bilingual models by language, the largest first]"
            "(delta_bleu.svg)",
            "A line is the mean of a sliding window of languages." + _left_out(found, bilingual[0]),
        ]
    for one in () if found.starts else found.compared:
        parts += [f"## Δ{METRIC_NAMES[one.metric]} against {one.baseline}", _means(found, one)]
    parts += [] if first else losses
    if found.rates:
        parts += ["## How translations fail", _rates(found)]
    parts += ["## How it was made", _made(found)]
    parts += [asked.notes.strip()] * bool(asked.notes)
    return "\n\n".join(parts) + "\n"


def here(found: Found) -> str:
    """Returns mean differences over all languages, and findings of curves, in sentences."""
    if found.ablation:
        return ablations.here(found.ablation, found.asked)
    if found.speedrun:
        return speedrun.here(found.speedrun, found.asked)
    if found.starts:
        return starts.here(found.starts, found.asked)
    if found.asked.extraction:
        return extraction.here(found.asked)
    if found.zero_shot:
        return zero_shot.here(found.zero_shot)
    losses = curves.here(found.curves, found.asked.curves) if found.curves else ""
    said = [
        f"{mean.system} {difference(mean)}"
        for one in found.compared[:1]
        if one.baseline == BILINGUAL
        for mean in _all(one)
    ]
    against = [
        f"BLEU against {one.baseline}: "
        + ", ".join(f"{mean.system} {difference(mean)}" for mean in _all(one))
        for one in found.compared
        if one.baseline != BILINGUAL and one.metric == "bleu"
    ]
    first = f"Mean ΔBLEU against bilingual models: {', '.join(said)}." if said else ""
    second = f" {'; '.join(against)}." if against else ""
    parts = [losses, first + second]
    said = " ".join(parts if "folder" in found.asked.curves else parts[::-1])
    return said.strip() or f"{NOT_YET.capitalize()}."


def _all(one: Compared) -> list[Average]:
    return [mean for mean in one.means if mean.level == "all"]


def difference(mean: Average) -> str:
    if mean.undertrained:
        return UNDERTRAINED
    return f"{signed(mean.delta)} [{signed(mean.low)}, {signed(mean.high)}]"


def state(found: Found) -> str:
    """Describes which runs exist and which are missing."""
    asked = found.asked
    if found.ablation:
        return (
            f"{sum(len(run.nll) for run in found.ablation)} runs of {len(found.ablation)} settings."
        )
    if found.speedrun:
        return f"{len(found.speedrun.rows)} runs."
    if asked.extraction:
        return f"{len(asked.extraction['part'])} models and parts."
    many = len(found.curves) if "folder" in found.asked.curves else 0
    trained = [f"{many} configs trained"] * bool(many)
    if not found.sizes:
        return f"{trained[0]}." if trained else "Nothing is trained yet."
    have = found.of(BILINGUAL)
    count = len(have.directions) if have else 0
    needed = count if found.starts else len(found.sizes)  # old languages have none there
    many = f"{count} of {needed} bilingual models"
    parts = [*trained, many if count == needed else f"{many} so far"] if asked.baselines else []
    for name in found.asked.runs:
        about, one = found.about.get(name), found.of(name)
        if about is None:
            parts.append(f"{name}: not begun")
        elif one is None:
            parts.append(f"{name}: in training, step {about['step']:,}")
        else:
            steps = {row["step"] for row in one.directions.values()}
            parts.append(f"{name}: step {', '.join(f'{step:,}' for step in sorted(steps))}")
    return "; ".join(parts) + "."


def _left_out(found: Found, one: Compared) -> str:
    small = small_tests(one.rows, found.levels)
    missing = sorted(set(found.sizes) - {row.language for row in one.rows})
    lines = [f"Left out, without a bilingual model yet: {', '.join(missing)}."] * bool(missing)
    lines += [f"{small_tests_line(small, found.levels)}."] * bool(small)
    return "".join(f" {line}" for line in lines)


def _means(found: Found, one: Compared) -> str:
    """A line a resource level, a column a system."""
    systems = list(dict.fromkeys(row.system for row in one.rows))
    side = one.means[0].side if one.means else ""
    lines = []
    for level in (*LEVELS, "all"):
        means = {m.system: m for m in one.means if m.level == level and m.side == side}
        if not means:
            continue
        first = next(iter(means.values()))
        cells = [f"{level} ({first.languages})", f"{first.baseline_score:.1f}"]
        for system in systems:
            mean = means[system]
            cells += [f"{mean.system_score:.1f}", difference(mean)]
        lines.append(cells)
    head = ["languages", one.baseline, *(cell for name in systems for cell in (name, "Δ"))]
    pairs = (f"high: {found.levels.high_resource_from:,} training pairs or more; low: fewer than "
             f"{found.levels.low_resource_below:,}")  # fmt: skip
    note = f"{METRIC_NAMES[one.metric]}, means over languages; in brackets the 95% interval of the"
    return f"{note} difference (paired bootstrap); {pairs}.\n\n{table(head, lines)}"


def _rates(found: Found) -> str:
    rows = [row for row in found.rates if row["system"] != COPY]
    known = {key: name for key, name in RATES.items() if any(row[key] is not None for row in rows)}
    head = ["system", "directions", *(f"{name}, %" if key != "length_ratio" else name
                                      for key, name in known.items())]  # fmt: skip
    order = ["reference", BILINGUAL, *found.asked.runs, *zero_shot.systems(found.asked)]
    ranked = sorted(rows, key=lambda row: order.index(row["system"]))
    means = summary(ranked, found.levels)
    sides = len({row["side"] for row in means}) > 1
    lines = [
        [f"{row['system']}" + f", {row['side']}" * sides, str(row["directions"]),
         *(shown(name, row[name]) for name in known)]
        for row in means
    ]  # fmt: skip
    about = 'Means over directions; what they are: docs/evaluation.md, "How translations fail".'
    said = [". ".join(map(_sentence, notes(rows))) + "."] if "off_language" in known else []
    return "\n\n".join([about, table(head, lines), *said])


def _sentence(line: str) -> str:
    return line[0].upper() + line[1:]


def _made(found: Found) -> str:
    asked = found.asked
    lines = [
        [name, f"{about['step']:,}", f"{hours:.2f}" if (hours := about["training_hours"]) else "",
         about["date"] or "", f"`{asked.command.format(name)}`"]
        for name, about in found.about.items()
    ]  # fmt: skip
    if found.baselines:
        hours = sum(_seconds(row) for row in found.baselines) / 3600
        steps = [row["result"]["note"]["step"] for row in found.baselines]
        lines.append([f"bilingual ({len(steps)})", f"{min(steps):,} to {max(steps):,}",
                      f"{hours:.2f} of one core", "", "as one of the runs"])  # fmt: skip
    parts = [f"Machine: {asked.machine}. Corpus: {asked.corpus}."]
    if found.ablation:
        parts.append(ablations.made(asked))
    elif asked.extraction:
        parts.append(f"Parts: `{asked.command}`.")
    if lines:
        head = ["system", "steps", "hours in training steps", "date", "command"]
        parts.append(table(head, lines))
    if found.baselines:
        cut = [row for row in found.baselines if not row["result"]["stopped_early"]]
        gain = np.mean([row["result"]["gain_last_quarter"] for row in found.baselines])
        parts.append(
            f"Bilingual models: {len(found.baselines) - len(cut)} ended by dev chrF, {len(cut)} by "
            f"the most steps; in the last quarter of its steps a model gained {gain:.1f} chrF on "
            "dev (mean)."
        )
    return "\n\n".join(parts)


def _seconds(row: dict) -> float:
    return row["result"]["note"].get("seconds_in_steps", 0.0)
