"""Words and numbers that several tables of a plan share."""

from m4.plan.machines import GIB

MODEL_NOTE = (
    "A MODEL, not a measurement: the compiler's estimate of cycles at the chip's clock, and "
    "collectives at the links' stated speed; no overlap, no latency."
)
# Kinds of operations (`m4.plan.flops`) -> their names in a plan.
OPERATIONS = {
    "attention": "attention projections",
    "attention_logits": "attention logits and weighted sums",
    "dense": "dense feed-forward layers",
    "experts": "experts, all slots",
    "experts_used": "experts, two a token (model FLOPs)",
    "dispatch": "one-hot dispatch and combine",
    "logits": "logits",
}


def gib(count: float) -> str:
    """Bytes in GiB."""
    return f"{count / GIB:.3f}"


def tera(count: float) -> str:
    """Operations in 10^12."""
    return f"{count / 1e12:.3f}"


def uncounted(unread: dict[str, int], where: str) -> str:
    """The note on operations that are not counted and may be products; where: "a step"."""
    kinds = ", ".join(sorted(unread))
    return (
        f"{sum(unread.values()):,} operations of {where} are not counted and may be products: "
        f"{kinds}."
    )
