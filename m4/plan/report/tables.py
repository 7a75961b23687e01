"""The tables of a plan: what `m4.plan.compile.facts` found, as `m4.plan.report.pages` shows it."""

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console

from m4.plan import table3
from m4.plan.clusters import Cluster
from m4.plan.machines import GIB, Topology, topology
from m4.plan.report import decoding_tables, pages
from m4.plan.report.pages import Section
from m4.plan.report.wording import KERNELS, OPERATIONS, gib, model_notes, tera, uncounted
from m4.plan.step_time import clock_of


def sections(facts: Mapping[str, Any]) -> list[Section]:
    """All tables of a plan."""
    found = [_memory(facts)]
    if "refused" in facts:
        return [*found, _parameters(facts), _made(facts)]
    found.append(_collectives(facts))
    decode = facts["program"] == "decode"
    found += decoding_tables.sections(facts) if decode else [_flops(facts), _time(facts)]
    found += [_parameters(facts), _made(facts)]
    return [section for section in found if section.notes or section.rows]


def title(facts: Mapping[str, Any]) -> str:
    what = {"train": "a training step", "decode": "a beam search"}[facts["program"]]
    return f"{facts['config']} on {facts['topology']}: {what} on {facts['devices']:,} devices"


def verdict(facts: Mapping[str, Any]) -> str:
    """One line: whether it fits."""
    if "refused" in facts:
        return f"does not fit: {facts['refused']['message']}"
    used, there = sum(facts["memory_bytes"].values()), facts["device_bytes"]
    return f"fits: {used / GIB:.2f} of {there / GIB:.0f} GiB a device at most"


def file_name(facts: Mapping[str, Any]) -> str:
    """The stem of a plan's files: moe_128e_12l.v3-8x8, for decoding moe_128e_12l.v3-8x8.decode."""
    name = f"{facts['config']}.{facts['topology'].replace(':', '-').replace('*', 'x')}"
    return name if facts["program"] == "train" else f"{name}.{facts['program']}"


def _memory(facts: Mapping[str, Any]) -> Section:
    given = facts["given_bytes"]
    if "refused" in facts:
        refused = facts["refused"]
        rows = [("kind", "GiB a device"), *[(k, gib(n)) for k, n in given.items()]]
        if refused["needed_bytes"] is not None:
            source = "sum of the above" if _on_gpus(facts) else "by the compiler"
            rows.append((f"needed, {source}", gib(refused["needed_bytes"])))
            rows.append(("available", gib(refused["available_bytes"])))
        helps = [f"would help: {line}" for line in refused["advice"]]
        return Section("Memory", helps, rows)
    by_kind = facts["memory_bytes"]
    total = sum(by_kind.values())
    rows = [("kind", "GiB a device"), *[(kind, gib(n)) for kind, n in by_kind.items()]]
    rows += [("total", gib(total)), ("memory of a device", gib(facts["device_bytes"]))]
    notes = [
        "Replicated weights are all but the experts'; temporaries are activations, gradients and "
        "buffers of collectives, by XLA's analysis of the program. Not all exist at the same "
        "time, and the system reserves some memory: the compiler decides whether the program fits. "
        "Counts and log rows are what training keeps from step to step in addition."
    ]
    return Section("Memory", notes, rows)


def _collectives(facts: Mapping[str, Any]) -> Section:
    if "no_text" in facts:
        return Section(
            "Collectives",
            [
                "the compiler cannot print its program for this machine, so collectives and step "
                f"time are unknown: {facts['no_text']}"
            ],
        )
    each = "a batch" if facts["program"] == "decode" else "a step"
    rows = [("kind", each, "payload, GiB a device", "sent, GiB a device")]
    for kind, total in facts["collectives"].items():
        rows.append(
            (
                kind,
                f"{total['count']:,}",
                f"{total['payload_bytes'] / GIB:.3f}",
                f"{total['sent_bytes'] / GIB:.3f}",
            )
        )
    notes = ["Of the compiled program, loops multiplied out."]
    machine = topology(facts["topology"])
    if isinstance(machine, Topology) and machine.slices > 1:
        sent = facts["sent_bytes"]
        rows.append(("all, inside a slice (ICI)", "", "", f"{sent['ici'] / GIB:.3f}"))
        rows.append(("all, between slices (DCN)", "", "", f"{sent['dcn'] / GIB:.3f}"))
        notes.append(
            "Inside a slice over its links; between slices, by the groups in the program, over the "
            f"data center's network: {machine.chip.host_network_bytes / 1e9:g} GB/s a host of "
            f"{machine.chip.host_chips} chips."
        )
    if facts["program"] == "decode":
        notes.append(
            "The search's loop counts once: the text decides how many decoding steps it has."
        )
    elif facts["loops_unknown"]:
        notes.append("A loop's length is not in the program: its body counts once.")
    return Section("Collectives", notes, rows)


def _flops(facts: Mapping[str, Any]) -> Section:
    flops = facts["flops"]
    rows = [("operations", "10^12 a device and step")]
    rows += [
        (f"forward: {OPERATIONS.get(k, k)}", tera(n)) for k, n in flops["forward"].items() if n
    ]
    rows += [
        ("model FLOPs (forward and backward, two experts a token)", tera(flops["model"])),
        ("executed, by arithmetic", tera(flops["executed"])),
        ("executed, by the traced program", tera(flops["traced"])),
    ]
    notes = [
        "Executed FLOPs exceed the model's: empty slots of experts, one-hot products of dispatch, "
        "and rematerialization in the backward pass "
        f"(transformer.Transformer.remat = '{facts['model']['remat']}'). The traced program also "
        "has the gate's small products. XLA's own count, with each loop's body once, is not shown."
    ]
    if "compiled" in flops:
        rows.append(("executed, in the compiled program", tera(flops["compiled"])))
        notes.append(_compiled(flops))
        if flops.get("kernels"):
            notes.append(KERNELS)
        if facts["loops_unknown"]:
            notes.append("A loop whose length is not in the program counts once there.")
    return Section("FLOPs", notes, rows)


def _compiled(flops: Mapping[str, Any]) -> str:
    """What the compiled program's count includes, and why it differs from the traced one."""
    more = flops["compiled"] / flops["traced"] - 1
    said = (
        "The compiled program's matrix products are read from its text (dots, convolutions, GEMMs; "
        f"loops multiplied out): {more:+.1%} of the traced one's. "
    )
    if more > _SAME_FLOPS:
        said += (
            "More: the compiler repeats on several devices what it does not shard, and recomputes. "
        )
    elif more < -_SAME_FLOPS:
        said += (
            "Less: the compiler removes unused and duplicate work (in a stack of one block, which "
            "has no loop: the keys and values of the encoder's output, which remat repeats), and "
            "writes products of vectors as multiplications and sums, which are not counted. "
        )
    if unread := flops["unread"]:
        said += uncounted(unread, "a step")
    return said.strip()


_SAME_FLOPS = 0.01
_SECTION_5_2 = (
    "The paper's section 5.2: on 128 cores the all-to-all takes 16% of the time of MoE and "
    "Transformer layers, on 2,048 it takes 36%, and they 1.7 times as long. By this model 36 "
    "layers have 16% and 36% of a step and 1.62 times its time, at equal tokens a core."
)
_TIME = "Step time: a model"


def _time(facts: Mapping[str, Any]) -> Section:
    if "step_seconds" not in facts:
        return Section(_TIME)
    seconds = facts["step_seconds"]
    if seconds["total"] is None:
        return Section(_TIME, ["No time model: the compiler's estimate of cycles is missing."])
    rows = [("part of a step", "seconds"), ("compute", f"{seconds['compute']:.3f}")]
    rows += [(kind, f"{s:.3f}") for kind, s in seconds["communication"].items()]
    rows.append(("step", f"{seconds['total']:.3f}"))
    cost = costs(facts)
    assert cost is not None
    machine = topology(facts["topology"])
    chip, device = "GPU" if _on_gpus(facts) else "chip", machine.chip.device_name
    exchange = sum(s for kind, s in seconds["communication"].items() if "all-to-all" in kind)
    rows += [
        ("all-to-all's share of the step", f"{exchange / seconds['total']:.0%}"),
        ("source tokens/s", f"{cost['source_tokens_per_second']:,.0f}"),
        ("target tokens/s", f"{cost['target_tokens_per_second']:,.0f}"),
        ("tokens/s (both sides)", f"{cost['tokens_per_second']:,.0f}"),
        ("days to 10^12 source tokens", f"{cost['days']:.1f}"),
        (f"{device}-years", f"{cost['device_years']:.1f}"),
        (f"{chip}-hours", f"{cost['chip_hours']:,.0f}"),
    ]
    if (price := facts.get("price_per_chip_hour")) is not None:
        rows.append(
            (f"price, at {price:g} a {chip} and hour", f"{cost['chip_hours'] * price:,.0f}")
        )
    rows.append(("model FLOPs / peak", f"{cost['utilisation']:.0%}"))
    notes = model_notes(machine)
    if facts["uncosted"] and clock_of(machine):
        notes.append(f"{facts['uncosted']:,} operations have no estimate and are not included.")
    if (row := paper_step(facts)) is not None and row.steps_per_second is not None:
        paper = 1 / float(row.steps_per_second)
        rows.append(("the paper's step (table 3)", f"{paper:.3f}"))
        rows.append(("model / paper", f"{seconds['total'] / paper:.2f}"))
        notes.append(
            f"The paper: {row.steps_per_second} steps/s, {row.days} days, {row.core_years} "
            "core-years, with another compiler and model code."
        )
        if row.config in table3.MODEL_SECONDS:
            notes.append(_SECTION_5_2)
    return Section(_TIME, notes, rows)


def paper_model(facts: Mapping[str, Any]) -> table3.PaperRow | None:
    """The paper's row of this model; None: it has none, or the sizes were changed.

    The paper excludes embeddings and softmax, up to 7%; over 10% off is another model.
    """
    row = table3.paper_row_of(facts["config"])
    if row is None:
        return None
    ratio = sum(facts["parameters"].values()) / row.parameters
    return row if abs(ratio - 1) <= _OTHER_MODEL else None


def paper_step(facts: Mapping[str, Any]) -> table3.PaperRow | None:
    """The row whose step this is: the paper's model, cores and batch, unchanged."""
    row, batch = paper_model(facts), facts["batch"]
    if row is None or facts.get("label") or not facts["topology"].startswith("v3:"):
        return None
    # The paper rounds: its 4M are 4 * 2^20 here, 4.9% more.
    ratio = batch["rows"] * batch["source_length"] / row.batch_tokens
    same = row.cores == facts["devices"] and abs(ratio - 1) <= _OTHER_BATCH
    return row if same else None


_OTHER_MODEL, _OTHER_BATCH = 0.1, 0.05


def costs(facts: Mapping[str, Any]) -> dict[str, float] | None:
    """What follows from the step time: tokens a second, all rows full; days, device-years (of JAX
    devices) and chip-hours to 10^12 source tokens; model FLOPs over the peak. None: no step time.

    `tokens_per_second` is of both sides, as in metrics.jsonl.
    """
    if facts["program"] != "train" or facts.get("step_seconds", {}).get("total") is None:
        return None
    batch, seconds = facts["batch"], facts["step_seconds"]["total"]
    source, target = (batch["rows"] * batch[f"{side}_length"] for side in ("source", "target"))
    days = table3.days(table3.TOKENS, source, 1 / Fraction(seconds))
    machine = topology(facts["topology"])
    return {
        "source_tokens_per_second": source / seconds,
        "target_tokens_per_second": target / seconds,
        "tokens_per_second": (source + target) / seconds,
        "days": float(days),
        "device_years": float(table3.core_years(days, facts["devices"])),
        "chip_hours": float(days) * 24 * machine.chips,
        "utilisation": facts["flops"]["model"]
        / seconds
        / machine.chip.device_flops(facts["model"]["dtype"]),
    }


def _parameters(facts: Mapping[str, Any]) -> Section:
    counts = facts["parameters"]
    rows = [("kind", "parameters"), *[(kind, f"{n:,}") for kind, n in counts.items()]]
    rows.append(("total", f"{sum(counts.values()):,}"))
    notes = []
    if (row := paper_model(facts)) is not None:
        ratio = sum(counts.values()) / row.parameters
        notes = [f"The paper (table 1): {row.parameters / 1e9:,g} billion; {ratio - 1:+.1%}."]
    return Section("Parameters", notes, rows)


def _made(facts: Mapping[str, Any]) -> Section:
    cost, batch = facts["compiler"], facts["batch"]
    model = facts["model"]
    rows = [
        ("what", "value"),
        ("rows, all devices", f"{batch['rows']:,}"),
        ("pieces a row, source + target", f"{batch['source_length']} + {batch['target_length']}"),
        ("vocabulary", f"{model['source_vocab_size'] or 'shared'} / {model['vocab_size']}"),
        ("directions", str(model["directions"])),
        ("activations", model["dtype"]),
        ("seconds to trace", f"{cost['trace_seconds']:.0f}"),
        ("seconds to compile", f"{cost['compile_seconds']:.0f}"),
        ("CPU seconds to compile", f"{cost['compile_cpu_seconds']:.0f}"),
        ("CPU seconds in all", f"{cost['cpu_seconds']:.0f}"),
        ("host memory, GiB", f"{cost['host_bytes'] / GIB:.1f}"),
        *[(name, version) for name, version in facts["versions"].items()],
    ]
    return Section("How this was compiled", (), rows)


def show(facts: Mapping[str, Any], console: Console) -> None:
    """The plan on the terminal."""
    console.print(title(facts), style="bold", highlight=False)
    console.print(verdict(facts), highlight=False)
    pages.show(sections(facts), console)


def write(facts: Mapping[str, Any], stem: Path) -> list[Path]:
    """Writes stem.json, .md and .html; returns them."""
    text = json.dumps(facts, ensure_ascii=False, indent=1) + "\n"
    return pages.write(stem, title(facts), verdict(facts), sections(facts), text)


def _on_gpus(facts: Mapping[str, Any]) -> bool:
    return isinstance(topology(facts["topology"]), Cluster)
