"""The report of a plan: one table, on the terminal and as a Markdown page."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from m4.html import in_markdown
from m4.parallel.platform.machines import GIB, Machine, topology
from m4.storage.files import write_text

Row = tuple[str, ...]
SENTENCES = 10**6
# Parts of a program -> their names in rows.
PARTS = {"train": {"step": "step"}, "decode": {"encoding": "encoding", "step": "decoding step"}}
# Kinds of operations (`m4.model.flops`) -> their names in rows.
OPERATIONS = {
    "attention": "attention projections",
    "attention_logits": "attention logits and weighted sums",
    "dense": "dense feed-forward layers",
    "shared": "shared experts",
    "experts": "experts, all slots",
    "experts_used": "experts, two a token (model FLOPs)",
    "dispatch": "one-hot dispatch and combine",
}
TOTALS = {
    "model": "of the model",
    "executed": "executed, by arithmetic",
    "traced": "executed, in the traced program",
}
# Least and greatest ratio of a step's time by the model to the paper's (docs/pod.md).
ERROR = {"512 and 2,048 experts": (1.16, 1.39), "128": (2.15, 2.57)}


class Report(NamedTuple):
    """A titled table with a one-line verdict and notes; the first row is the header."""

    title: str
    verdict: str
    rows: Sequence[Row]
    notes: Sequence[str]


def report(facts: Mapping[str, Any]) -> Report:
    """Returns the report of the facts of one plan (`m4.plan.compile.facts`)."""
    what = {"train": "a training step", "decode": "a beam search"}[facts["program"]]
    title = f"{facts['config']} on {facts['topology']}: {what} on {facts['devices']:,} devices"
    rows = [("", "of one device", ""), *_sizes(facts)]
    if "refused" not in facts:
        rows += [*_collectives(facts), *_flops(facts), *_time(facts)]
    return Report(title, verdict(facts), [*rows, *_made(facts)], [*_notes(facts)])


def verdict(facts: Mapping[str, Any]) -> str:
    """Returns one line on whether the program fits."""
    if "refused" in facts:
        return f"does not fit: {facts['refused']['message']}"
    used, there = sum(facts["memory_bytes"].values()), facts["device_bytes"]
    return f"fits: {used / GIB:.2f} of {there / GIB:.0f} GiB a device at most"


def file_name(facts: Mapping[str, Any]) -> str:
    """Returns the stem of a plan's files, such as moe_128e_12l.v3-8x8 or v4_128.v4-4x4x4.decode."""
    name = f"{facts['config']}.{facts['topology'].replace(':', '-').replace('*', 'x')}"
    return name if facts["program"] == "train" else f"{name}.{facts['program']}"


def show(made: Report, console: Console) -> None:
    """Prints a report."""
    console.print(made.title, style="bold", highlight=False)
    console.print(made.verdict, highlight=False)
    table = Table(*made.rows[0], box=box.SIMPLE_HEAD)
    table.columns[-1].justify = "right"
    for row in made.rows[1:]:
        table.add_row(*row)
    console.print(table)
    for note in made.notes:
        console.print(note, style="dim", highlight=False)


def write(made: Report, stem: Path, facts: Any) -> list[Path]:
    """Writes the facts as stem.json and the report as stem.md; returns both paths."""
    head, *rest = ("| " + " | ".join(map(in_markdown, row)) + " |" for row in made.rows)
    lines = [f"# {in_markdown(made.title)}", "", in_markdown(made.verdict), "", head,
             "| --- |" + " ---: |" * (len(made.rows[0]) - 1), *rest, "",
             *(f"- {in_markdown(note)}" for note in made.notes)]  # fmt: skip
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".json", ".md")]
    write_text(paths[0], json.dumps(facts, ensure_ascii=False, indent=1) + "\n")
    write_text(paths[1], "\n".join(lines) + "\n")
    return paths


def costs(facts: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns the figures that follow from the time model, or None without a time.

    For training with full rows: tokens per second (`tokens_per_second` counts both sides), days,
    device-years and chip-hours to 10^12 source tokens, and model FLOPs over the peak. For decoding
    with as many steps as allowed: seconds per batch, sentences per second with full batches of the
    longest sources, and chip-hours for 10^6 sentences.
    """
    seconds = {name: part["total"] for name, part in facts.get("seconds", {}).items()}
    if not seconds or None in seconds.values():
        return None
    batch, machine = facts["batch"], topology(facts["topology"])
    if facts["program"] == "decode":
        whole = seconds["encoding"] + batch["target_length"] * seconds["step"]
        hours = SENTENCES * whole / batch["rows"] / 3600 * machine.chips
        rate = batch["rows"] / whole
        return {"batch_seconds": whole, "sentences_per_second": rate, "chip_hours": hours}
    step = seconds["step"]
    source, target = (batch["rows"] * batch[f"{side}_length"] for side in ("source", "target"))
    days = TOKENS / source * step / (24 * 60 * 60)
    peak = machine.chip.device_flops(facts["model"]["dtype"])
    return {
        "source_tokens_per_second": source / step,
        "target_tokens_per_second": target / step,
        "tokens_per_second": (source + target) / step,
        "days": days,
        "device_years": days * facts["devices"] / 365,
        "chip_hours": days * 24 * machine.chips,
        "utilisation": facts["flops"]["step"]["model"] / step / peak,
    }


def time_notes(machine: Machine) -> list[str]:
    """Describes how the time model computes, and its error against measurements."""
    compute = (
        "the compiler's estimate of cycles at the chip's clock"
        if machine.chip.clock_hz
        else "executed FLOPs at the peak, which no program reaches (there is no estimate of "
        "cycles, or no published clock)"
    )
    fitted = ", the all-to-all at a speed fitted to section 5.2 of the GShard paper on TPU v3"
    error = ", ".join(f"for {name} {low} to {high}" for name, (low, high) in ERROR.items())
    return [
        f"Times are of a MODEL, not a measurement: {compute}, and collectives at the links' stated "
        f"speed{fitted if machine.chip.platform == 'tpu' else ''}; no overlap.",
        "Its error: times of the step that the GShard paper measured on TPU v3 with as many "
        f"cores, {error}. Nothing else was compared with a measurement.",
    ]


def _sizes(facts: Mapping[str, Any]) -> Iterator[Row]:
    by_kind, counts = facts.get("memory_bytes", facts["given_bytes"]), facts["parameters"]
    for kind, size in by_kind.items():
        yield "memory, GiB", kind, f"{size / GIB:.3f}"
    if "refused" not in facts:
        yield "memory, GiB", "total", f"{sum(by_kind.values()) / GIB:.3f}"
    yield "memory, GiB", "memory of a device", f"{facts['device_bytes'] / GIB:.3f}"
    for kind, count in {**counts, "total": sum(counts.values())}.items():
        yield "parameters, all devices", kind, f"{count:,}"
    if row := paper_model(facts):
        yield "parameters, all devices", "the paper (table 1)", f"{row.parameters:,.0f}"


def _collectives(facts: Mapping[str, Any]) -> Iterator[Row]:
    name = "collectives: payload, sent, GiB"
    for kind, total in facts.get("collectives", {}).items():
        payload, sent = total["payload_bytes"] / GIB, total["sent_bytes"] / GIB
        yield name, f"{kind}, {total['count']:,} x", f"{payload:.3f}, {sent:.3f}"
    if topology(facts["topology"]).slices > 1 and "sent_bytes" in facts:
        yield name, "all, inside a slice (ICI)", f"{facts['sent_bytes']['ici'] / GIB:.3f}"
        yield name, "all, between slices (DCN)", f"{facts['sent_bytes']['dcn'] / GIB:.3f}"


def _flops(facts: Mapping[str, Any]) -> Iterator[Row]:
    for part, prefix in PARTS[facts["program"]].items():
        name, flops = f"FLOPs, 10^12: {prefix}", facts["flops"][part]
        for kind, count in flops["forward"].items():
            if count:
                yield name, f"forward: {OPERATIONS.get(kind, kind)}", f"{count / 1e12:.4f}"
        yield from ((name, TOTALS[k], f"{flops[k] / 1e12:.4f}") for k in TOTALS if k in flops)


def _time(facts: Mapping[str, Any]) -> Iterator[Row]:
    if (cost := costs(facts)) is None:
        return
    for part, prefix in PARTS[facts["program"]].items():
        name, seconds = f"seconds, a model: {prefix}", facts["seconds"][part]
        yield name, "compute", f"{seconds['compute']:.4f}"
        yield from ((name, kind, f"{each:.4f}") for kind, each in seconds["communication"].items())
        yield name, "total", f"{seconds['total']:.4f}"
    machine = topology(facts["topology"])
    chip = "GPU" if machine.chip.platform == "cuda" else "chip"
    if facts["program"] == "decode":
        name, aim = "follows, all decoding steps", f"{SENTENCES:,} sentences"
        yield name, "seconds of a batch", f"{cost['batch_seconds']:.2f}"
        yield name, "sentences/s", f"{cost['sentences_per_second']:,.1f}"
    else:
        name, aim = "follows", "10^12 source tokens"
        step = facts["seconds"]["step"]
        exchange = sum(s for kind, s in step["communication"].items() if "all-to-all" in kind)
        yield name, "all-to-all's share of the step", f"{exchange / step['total']:.0%}"
        for side in ("source", "target"):
            yield name, f"{side} tokens/s", f"{cost[f'{side}_tokens_per_second']:,.0f}"
        yield name, "tokens/s (both sides)", f"{cost['tokens_per_second']:,.0f}"
        yield name, f"days to {aim}", f"{cost['days']:.1f}"
        yield name, f"{machine.chip.device_name}-years", f"{cost['device_years']:.1f}"
        yield name, "model FLOPs / peak", f"{cost['utilisation']:.0%}"
        if (row := paper_step(facts)) and row.steps_per_second:
            paper = 1 / row.steps_per_second
            yield name, "the paper's step (table 3), s", f"{paper:.3f}"
            yield name, "model / paper", f"{step['total'] / paper:.2f}"
    yield name, f"{chip}-hours for {aim}", f"{cost['chip_hours']:,.0f}"
    if (price := facts.get("price_per_chip_hour")) is not None:
        yield name, f"price, at {price:g} a {chip} and hour", f"{cost['chip_hours'] * price:,.0f}"


def _made(facts: Mapping[str, Any]) -> Iterator[Row]:
    cost, batch, model = facts["compiler"], facts["batch"], facts["model"]
    seconds = f"{cost['trace_seconds']:.0f}, {cost['compile_seconds']:.0f}"
    rows = {
        "rows, all devices": f"{batch['rows']:,}",
        "pieces a row": f"{batch['source_length']} + {batch['target_length']}",
        "vocabulary": f"{model['source_vocab_size'] or 'shared'} / {model['vocab_size']}",
        "directions, activations": f"{model['directions']}, {model['dtype']}",
        "seconds to trace, to compile": seconds,
        "CPU seconds, GiB of host": f"{cost['cpu_seconds']:.0f}, {cost['host_bytes'] / GIB:.1f}",
        **facts["versions"],
    }
    yield from (("compiled", name, said) for name, said in rows.items())


def _notes(facts: Mapping[str, Any]) -> Iterator[str]:
    if "refused" in facts:
        yield from (f"would help: {line}" for line in facts["refused"]["advice"])
        return
    yield (
        "Replicated weights are all but the experts'; temporaries are activations, gradients and "
        "buffers of collectives. Not all exist at the same time, and the system reserves some "
        "memory: the compiler decides whether the program fits."
    )
    if "no_text" in facts:
        said = "The compiler cannot print its program for this machine: no collectives, no time: "
        yield said + facts["no_text"]
        return
    if facts["program"] == "decode":
        most, loops = facts["batch"]["target_length"], facts["unknown_loops"]
        yield (
            f"The text decides how many decoding steps there are, at most {most}; the search's "
            f"loop counts once. There are {loops} loops of unknown length (one is expected)."
        )
    elif facts["unknown_loops"]:
        yield "A loop's length is not in the program: its body counts once."
    for part, name in PARTS[facts["program"]].items():
        if facts["flops"][part]["kernels"]:
            yield f"Kernels of experts in the {name} are counted as if routing were balanced."
        if (count := facts["uncosted"][part]) and topology(facts["topology"]).chip.clock_hz:
            yield f"{count:,} operations of the {name} have no estimate of cycles."
    if costs(facts) is None:
        yield "No time model: no cycles are known, and FLOPs do not decide a decoding step's time."
    else:
        yield from time_notes(topology(facts["topology"]))


# Training is counted by source pieces, as in GShard's Table 3 (arXiv 2006.16668, footnote 7).
TOKENS = 10**12


class PaperRow(NamedTuple):
    """One model of Table 3 as printed, with its size from Table 1, or None if not given."""

    model: str
    config: str
    cores: int
    parameters: float
    steps_per_second: float | None
    batch_tokens: int
    core_years: str | None
    days: str | None
    tokens: int = TOKENS  # for its days and core-years


TABLE3 = (
    PaperRow("(1) MoE(2048E, 36L)", "moe_2048e_36l", 2048, 600e9, 0.72, 4_000_000, "22.4", "4.0"),
    PaperRow("(2) MoE(2048E, 12L)", "moe_2048e_12l", 2048, 200e9, 2.15, 4_000_000, "7.5", "1.4"),
    PaperRow("(3) MoE(512E, 36L)", "moe_512e_36l", 512, 150e9, 1.05, 1_000_000, "15.5", "11.0"),
    PaperRow("(4) MoE(512E, 12L)", "moe_512e_12l", 512, 50e9, 3.28, 1_000_000, "4.9", "3.5"),
    PaperRow("(5) MoE(128E, 36L)", "moe_128e_36l", 128, 37e9, 0.67, 1_000_000, "6.1", "17.3"),
    PaperRow("(6) MoE(128E, 12L)", "moe_128e_12l", 128, 12.5e9, 2.16, 1_000_000, "1.9", "5.4"),
    PaperRow("* MoE(2048E, 60L)", "moe_2048e_60l", 2048, 1e12, None, 4_000_000, None, None),
    # 300,000 steps (section 4.2) of 4 million pieces.
    PaperRow("T(96L)", "t_96l", 2048, 2.3e9, None, 4_000_000, "235.5", "42", 12 * 10**11),
)


def paper_row_of(config: str) -> PaperRow | None:
    """Returns the row of the model with the config of this name (a file's stem)."""
    return next((row for row in TABLE3 if row.config == config), None)


def paper_model(facts: Mapping[str, Any]) -> PaperRow | None:
    """Returns the paper's row of this model, or None if it has none or sizes were changed.

    The paper excludes embeddings and softmax, up to 7%; over 10% off is another model.
    """
    row = paper_row_of(facts["config"])
    if row is None or abs(sum(facts["parameters"].values()) / row.parameters - 1) > 0.1:
        return None
    return row


def paper_step(facts: Mapping[str, Any]) -> PaperRow | None:
    """Returns the paper's row if model, cores and batch are unchanged, otherwise None."""
    row, batch = paper_model(facts), facts["batch"]
    if row is None or facts.get("label") or not facts["topology"].startswith("v3:"):
        return None
    # The paper rounds: its 4M are 4 * 2^20 here, 4.9% more.
    ratio = batch["rows"] * batch["source_length"] / row.batch_tokens
    same = row.cores == facts["devices"] and abs(ratio - 1) <= 0.05
    return row if same else None
