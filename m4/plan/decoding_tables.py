"""What a plan tells of decoding: of encoding a batch, and of a turn of the search's loop.

How many turns there are the text decides. Their number has a bound, the longest translation that is
allowed; what follows from it is told as "all turns".
"""

from collections.abc import Mapping
from typing import Any

from m4.plan.clusters import Cluster
from m4.plan.machines import topology
from m4.plan.pages import Section
from m4.plan.wording import MODEL_NOTE, OPERATIONS, uncounted

# Kinds of parts: fact -> (as a row calls it, where an operation of it is).
PARTS = {"encoding": ("encoding a batch", "encoding"), "turn": ("a turn", "a turn")}
SENTENCES = 10**6
# From here on the compiled program does more than arithmetic says; gates' small products are less.
_MORE = 1.05


def sections(facts: Mapping[str, Any]) -> list[Section]:
    """FLOPs and the model of the time, of a beam search."""
    return [_flops(facts), _time(facts)]


def costs(facts: Mapping[str, Any]) -> dict[str, float] | None:
    """What the model of the time comes to if the search takes all turns that it may.

    Seconds of a batch; sentences a second, with full batches of the longest sources; chip-hours
    to 10^6 sentences. None: there is no such model.
    """
    seconds = facts.get("search_seconds")
    if seconds is None or any(seconds[part]["total"] is None for part in PARTS):
        return None
    batch = facts["batch"]
    whole = seconds["encoding"]["total"] + batch["target_length"] * seconds["turn"]["total"]
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
    told = {
        "model": "model FLOPs (two experts a token)",
        "executed": "executed, by arithmetic",
        "compiled": "executed, in the compiled program",
    }
    for key, name in told.items():
        if key in flops["encoding"]:
            rows.append((name, *(_giga(flops[part][key]) for part in PARTS)))
    notes = [
        "Encoding is all that is done once a batch: the encoder, and the keys and values of its "
        "output for every layer of the decoder. A turn of the search's loop takes a piece of every "
        "hypothesis through the decoder, over all places of the cache. The text decides how many "
        f"turns there are, at most {facts['batch']['target_length']}."
    ]
    if facts["model"]["experts"] and facts["model"]["eval_capacity_factor"] is None:
        notes.append(
            "Seats of experts are many times two a token, and most are empty: with "
            "moe.MoeLayer.eval_capacity_factor = None each expert has a seat for every "
            "token. A factor, say 2.0, makes fewer seats, and drops tokens that find none. One-hot "
            "products over the seats are made by the dispatch einsum alone; gather has the same "
            "result without them."
        )
    if "compiled" in flops["encoding"]:
        notes.append(
            "In the compiled program matrix products are counted as they stand in its text; those "
            "that it writes as multiplications and sums are not in it."
        )
        for part, (name, where) in PARTS.items():
            if flops[part]["compiled"] > _MORE * flops[part]["executed"]:
                notes.append(
                    f"{name}: the compiled program does more than by arithmetic. The compiler "
                    "repeats on several devices what it does not split, such as groups of tokens "
                    "(moe.MoeLayer.group_tokens) that are fewer than the devices."
                )
            if flops[part]["unread"]:
                notes.append(uncounted(flops[part]["unread"], where))
        if facts["search_loops"] != 1:
            notes.append(
                f"The program has {facts['search_loops']} loops whose length it does not tell, "
                "where one was looked for: a turn is one of each."
            )
    return Section("FLOPs", notes, rows)


def _time(facts: Mapping[str, Any]) -> Section:
    title = "Time of decoding: a model"
    if isinstance(topology(facts["topology"]), Cluster):
        said = (
            "No model of the time: XLA estimates no cycles for GPUs, and a turn waits for weights "
            "and keys to be read, which its FLOPs do not tell."
        )
        return Section(title, [said])
    if "search_seconds" not in facts:
        return Section(title)
    seconds, cost = facts["search_seconds"], costs(facts)
    if cost is None:
        return Section(title, ["No model of the time: the clock of this chip is not published."])
    rows = [("part", "seconds")]
    for part, (name, _) in PARTS.items():
        rows.append((f"{name}: compute", f"{seconds[part]['compute']:.4f}"))
        sent = seconds[part]["communication"]
        rows += [(f"{name}: {kind}", f"{each:.4f}") for kind, each in sent.items()]
        rows.append((name, f"{seconds[part]['total']:.4f}"))
    batch = facts["batch"]
    million = f"{SENTENCES:,} sentences, all turns"
    rows += [
        ("turns, at most", f"{batch['target_length']}"),
        (f"a batch of {batch['rows']:,} sentences, all turns", f"{cost['batch_seconds']:.2f}"),
        ("sentences a second, all turns", f"{cost['sentences_per_second']:,.1f}"),
        (f"chip-hours for {million}", f"{cost['chip_hours']:,.2f}"),
    ]
    if (price := facts.get("price_per_chip_hour")) is not None:
        name = f"price for {million}, at {price:g} a chip and hour"
        rows.append((name, f"{cost['chip_hours'] * price:,.2f}"))
    notes = [
        MODEL_NOTE,
        '"All turns" is an upper bound on the turns, not on the time: the longest translations '
        "that are allowed, of the longest sources, in full batches. A batch ends earlier when none "
        "of its sentences can get a better translation.",
    ]
    for part, (_, where) in PARTS.items():
        if count := facts["uncosted"][part]:
            notes.append(f"{count:,} operations of {where} have no estimate and are not in it.")
    return Section(title, notes, rows)


def _giga(count: float) -> str:
    return f"{count / 1e9:,.1f}"
