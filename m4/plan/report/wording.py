"""Words and numbers that several tables of a plan share."""

from m4.plan import table3
from m4.plan.clusters import Cluster
from m4.plan.machines import GIB, Machine
from m4.plan.step_time import clock_of

_CYCLES = "the compiler's estimate of cycles at the chip's clock"
_PEAK = (
    "executed FLOPs at the peak, which no program reaches (there is no estimate of cycles, or no "
    "published clock)"
)
_LINKS = "collectives at the links' stated speed"
_FITTED = ", the all-to-all at a speed fitted to section 5.2 of the GShard paper on TPU v3"
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
KERNELS = (
    "Kernels of grouped products (experts) multiply the rows that there are: theirs are by "
    "arithmetic, as if routing were balanced over the devices. In a program rows travel in as "
    "many rounds as routing needs: one where it is balanced."
)


def model_notes(machine: Machine) -> list[str]:
    """What the time model is, and its distance from what was measured."""
    compute = _CYCLES if clock_of(machine) else _PEAK
    fitted = "" if isinstance(machine, Cluster) else _FITTED
    what = f"A MODEL, not a measurement: {compute}, and {_LINKS}{fitted}; no overlap."
    low, high = table3.band(512, 2048)
    low_128, high_128 = table3.band(128)
    return [
        what,
        f"Its error: for the GShard paper's models of 512 and 2,048 experts, on TPU v3, it gives "
        f"{low:.2f} to {high:.2f} of the step that the paper measured, for those of 128 experts "
        f"{low_128:.2f} to {high_128:.2f}. Nothing else was compared with a measurement; on other "
        "machines the error is not known.",
    ]


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
