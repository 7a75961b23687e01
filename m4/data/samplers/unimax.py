"""UniMax: as uniform as a bound on repeats allows."""

from typing import Annotated

from m4.data.samplers import check_sizes, normalized
from m4.settings import Between, SettingError, checked


@checked
def unimax(
    sizes: dict[str, int],
    max_epochs: Annotated[float, Between(0, 1e9, above=True)] = 4.0,
    budget: Annotated[float | None, Between(0, 1e15, above=True)] = None,
    drawn: float | None = None,
) -> dict[str, float]:
    """Returns rates at which no direction is seen more than `max_epochs` times.

    The budget is divided evenly, beginning with the smallest direction; one that would be seen more
    than max_epochs times gets just that, and the rest goes to the larger ones. Draws are random in
    the short run, so a small direction may be seen a little more often.

    Args:
        max_epochs: Maximum number of times that a direction is seen.
        budget: Number of draws of the training, in the unit of the sizes. Defaults to `drawn`.
        drawn: Number of draws of the whole run, which m4 computes from the steps.

    Raises:
        SettingError: All data max_epochs times is less than the budget, or there is no budget.

    Source: Chung et al. 2023, "UniMax: Fairer and more Effective Language Sampling for Large-Scale
    Multilingual Pretraining", Algorithm 1 (there in characters).
    """
    check_sizes(sizes)
    budget = drawn if budget is None else budget
    if budget is None:
        raise SettingError("unimax.budget", None, "set here, where what the run draws is not known")
    if (most := max_epochs * sum(sizes.values())) < budget:
        needed = f"at least {budget / sum(sizes.values()):.3g}, or train fewer steps"
        why = f"it allows {most:,.0f} draws and training makes {budget:,.0f}"
        raise SettingError("unimax.max_epochs", max_epochs, f"{needed}: {why}")
    left, shares = float(budget), {}
    for number, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        shares[name] = min(left / (len(sizes) - number), max_epochs * sizes[name])
        left -= shares[name]
    return normalized({name: shares[name] for name in sizes})
