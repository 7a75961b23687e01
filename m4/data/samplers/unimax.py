"""UniMax: as uniform as a bound on repeats allows."""

from __future__ import annotations

from m4.data.samplers import check_sizes, normalized


def unimax(
    sizes: dict[str, int],
    max_epochs: float = 4.0,
    budget: float | None = None,
    drawn: float | None = None,
) -> dict[str, float]:
    """Rates at which no direction is seen more than `max_epochs` times.

    The budget is shared out evenly, the smallest direction first; one that would be seen more than
    max_epochs times gets just that, and what is left over goes to the larger ones. Draws are random
    in the short run, so that a small direction may be seen a little more often.

    Args:
        sizes: of the directions. budget: what training draws, in the unit of the sizes; None: what
            the whole run draws (`drawn`, which m4 works out from TRAIN_STEPS).

    Raises:
        ValueError: all data max_epochs times is less than the budget; the budget is not known.

    Source: Chung et al. 2023, "UniMax: Fairer and more Effective Language Sampling for Large-Scale
    Multilingual Pretraining", Algorithm 1 (there in characters).
    """
    check_sizes(sizes)
    if not 0 < max_epochs < float("inf"):
        raise ValueError(f"max_epochs is {max_epochs}: must be above 0 (unimax.unimax.max_epochs)")
    budget = drawn if budget is None else budget
    if budget is None:
        raise ValueError("how much is drawn is not known here: set unimax.unimax.budget")
    if not budget > 0:
        raise ValueError(f"budget is {budget}: must be above 0 (unimax.unimax.budget)")
    if (most := max_epochs * sum(sizes.values())) < budget:
        raise ValueError(
            f"max_epochs = {max_epochs:g} allows {most:,.0f} draws and training makes "
            f"{budget:,.0f}: at least {budget / sum(sizes.values()):.3g} epochs are needed "
            "(unimax.unimax.max_epochs; or fewer TRAIN_STEPS)"
        )
    left, shares = float(budget), {}
    for number, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        shares[name] = min(left / (len(sizes) - number), max_epochs * sizes[name])
        left -= shares[name]
    return normalized({name: shares[name] for name in sizes})
