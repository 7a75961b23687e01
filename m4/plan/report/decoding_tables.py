"""The tables of a plan of decoding: of encoding a batch, and of a decoding step.

The text decides how many decoding steps there are, at most as many as the longest translation that
is allowed has pieces; figures for that bound say "all steps".
"""

from collections.abc import Mapping
from typing import Any

from m4.plan.clusters import Cluster
from m4.plan.machines import topology
from m4.plan.report.pages import Section
from m4.plan.report.wording import KERNELS, OPERATIONS, model_notes, uncounted

# Part of a search -> (its name in rows, its name in notes).
PARTS = {
    "encoding": ("encoding a batch", "encoding"),
    "step": ("a decoding step", "a decoding step"),
}
SENTENCES = 10**6
# Times the arithmetic's FLOPs: above, the compiled program repeats work; gates add less.
_MORE = 1.05


def sections(facts: Mapping[str, Any]) -> list[Section]:
    """FLOPs and the time model of a beam search."""
    return [_flops(facts), _time(facts)]


def costs(facts: Mapping[str, Any]) -> dict[str, float] | None:
    """What follows from the time model if the search takes all steps that it may.

    Seconds of a batch; sentences a second, with full batches of the longest sources; chip-hours
    for 10^6 sentences. None: there is no time model.
    """
    seconds = facts.get("search_seconds")
    if seconds is None or any(seconds[part]["total"] is None for part in PARTS):
        return None
    batch = facts["batch"]
    whole = seconds["encoding"]["total"] + batch["target_length"] * seconds["step"]["total"]
    sentences = batch["rows"] / whole
    return {
        "batch_seconds": whole,
        "sentences_per_second": sentences,
        "chip_hours": SENTENCES / sentences / 3600 * topology(facts["topology"]).chips,
    }


def _flops(facts: Mapping[str, Any]) -> Section:
    flops = facts["flops"]
    names = (f"{name}, 10^9 a device" for name, _ in PARTS.values())
    rows: list[tuple[str, ...]] = [("operations", *names)]
    kinds: list[str] = [*flops["encoding"]["forward"], "logits"]
    for kind in kinds:
        counts = [flops[part]["forward"].get(kind, 0) for part in PARTS]
        if any(counts):
            rows.append((OPERATIONS.get(kind, kind), *map(_giga, counts)))
    totals = {
        "model": "model FLOPs (two experts a token)",
        "executed": "executed, by arithmetic",
        "compiled": "executed, in the compiled program",
    }
    for key, name in totals.items():
        if key in flops["encoding"]:
            rows.append((name, *(_giga(flops[part][key]) for part in PARTS)))
    notes = [
        "Encoding is done once a batch: the encoder, and the keys and values of its output for "
        "every layer of the decoder. A decoding step takes one piece of every hypothesis through "
        "the decoder, over all positions of the cache. The text decides how many steps there are, "
        f"at most {facts['batch']['target_length']}."
    ]
    if facts["model"]["experts"] and facts["model"]["eval_capacity_factor"] is None:
        notes.append(
            "With moe.MoeLayer.eval_capacity_factor = None nothing is dropped: experts multiply "
            "blocks of the rows that there are (dispatch dropless; as many as any routing may need "
            "count here, evenly over the devices), which travel to them over a mesh."
        )
    if "compiled" in flops["encoding"]:
        notes.append(
            "The compiled program's matrix products are read from its text; those that it writes "
            "as multiplications and sums are not counted."
        )
        if any(flops[part].get("kernels") for part in PARTS):
            notes.append(KERNELS)
        for part, (name, where) in PARTS.items():
            if flops[part]["compiled"] > _MORE * flops[part]["executed"]:
                notes.append(
                    f"{name}: the compiled program does more than by arithmetic. The compiler "
                    "repeats on several devices what it does not shard, such as groups of tokens "
                    "(moe.MoeLayer.group_tokens) that are fewer than the devices."
                )
            if flops[part]["unread"]:
                notes.append(uncounted(flops[part]["unread"], where))
        if facts["search_loops"] != 1:
            notes.append(
                f"The program has {facts['search_loops']} loops of unknown length, where one was "
                "expected: a decoding step is one iteration of each."
            )
    return Section("FLOPs", notes, rows)


def _time(facts: Mapping[str, Any]) -> Section:
    title = "Decoding time: a model"
    if isinstance(topology(facts["topology"]), Cluster):
        why = (
            "No time model: XLA estimates no cycles for GPUs, and a decoding step waits for "
            "weights and keys to be read, which its FLOPs do not show."
        )
        return Section(title, [why])
    if "search_seconds" not in facts:
        return Section(title)
    seconds, cost = facts["search_seconds"], costs(facts)
    if cost is None:
        return Section(title, ["No time model: the clock of this chip is not published."])
    rows = [("part", "seconds")]
    for part, (name, _) in PARTS.items():
        rows.append((f"{name}: compute", f"{seconds[part]['compute']:.4f}"))
        sent = seconds[part]["communication"]
        rows += [(f"{name}: {kind}", f"{each:.4f}") for kind, each in sent.items()]
        rows.append((name, f"{seconds[part]['total']:.4f}"))
    batch = facts["batch"]
    million = f"{SENTENCES:,} sentences, all steps"
    rows += [
        ("decoding steps, at most", f"{batch['target_length']}"),
        (f"a batch of {batch['rows']:,} sentences, all steps", f"{cost['batch_seconds']:.2f}"),
        ("sentences a second, all steps", f"{cost['sentences_per_second']:,.1f}"),
        (f"chip-hours for {million}", f"{cost['chip_hours']:,.2f}"),
    ]
    if (price := facts.get("price_per_chip_hour")) is not None:
        name = f"price for {million}, at {price:g} a chip and hour"
        rows.append((name, f"{cost['chip_hours'] * price:,.2f}"))
    notes = [
        *model_notes(topology(facts["topology"])),
        '"All steps" bounds the number of steps, not the time: the longest translations that are '
        "allowed, of the longest sources, in full batches. A batch ends earlier when none of its "
        "sentences can get a better translation.",
    ]
    for part, (_, where) in PARTS.items():
        if count := facts["uncosted"][part]:
            notes.append(f"{count:,} operations of {where} have no estimate and are not included.")
    return Section(title, notes, rows)


def _giga(count: float) -> str:
    return f"{count / 1e9:,.1f}"
