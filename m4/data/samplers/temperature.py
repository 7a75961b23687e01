"""Temperature sampling: p proportional to n^(1/T)."""

from collections.abc import Callable
from typing import Annotated

from m4.data.directions import pair_of, split_direction
from m4.data.samplers import check_sizes, normalized
from m4.settings import Between, OneOf, checked

_OF: dict[str, Callable[[str], str]] = {
    "direction": lambda direction: direction,
    "target": lambda direction: split_direction(direction)[1],
    "pair": pair_of,
}


@checked
def temperature(
    sizes: dict[str, int],
    temperature: Annotated[float, Between(1, 1e6)] = 5.0,
    scale: Annotated[float, Between(0, 1e9, above=True)] = 1.0,
    maximum: Annotated[float | None, Between(0, 1e15, above=True)] = None,
    by: Annotated[str, OneOf(tuple(_OF))] = "direction",
) -> dict[str, float]:
    """Returns rates min(n * scale, maximum) ** (1 / temperature), divided by their sum.

    The order (scale, cap, root) and the numbers are those of seqio.mixing_rate_num_examples.
    Source: Arivazhagan et al. 2019, "Massively Multilingual NMT in the Wild", section 4.2.

    Args:
        temperature: 1 is proportional sampling, and a high temperature nearly uniform.
        scale: Factor of sizes.
        maximum: Largest scaled size. Defaults to no limit.
        by: Unit of these rates: a direction, a target language or a language pair, whose directions
            share its rate by size.
    """
    check_sizes(sizes)
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        totals[_OF[by](name)] = totals.get(_OF[by](name), 0) + size
    capped = {
        n: size * scale if maximum is None else min(size * scale, maximum)
        for n, size in totals.items()
    }
    rates = normalized({name: size ** (1.0 / temperature) for name, size in capped.items()})
    if by == "direction":
        return rates
    return {name: rates[_OF[by](name)] * n / totals[_OF[by](name)] for name, n in sizes.items()}
