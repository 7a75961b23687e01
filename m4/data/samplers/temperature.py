"""Temperature sampling: p proportional to n^(1/T)."""

from typing import Annotated

from m4.data.samplers import check_sizes, normalized
from m4.settings import Between, checked


@checked
def temperature(
    sizes: dict[str, int],
    temperature: Annotated[float, Between(1, 1e6)] = 5.0,
    scale: Annotated[float, Between(0, 1e9, above=True)] = 1.0,
    maximum: Annotated[float | None, Between(0, 1e15, above=True)] = None,
) -> dict[str, float]:
    """Returns rates min(n * scale, maximum) ** (1 / temperature), divided by their sum.

    The order (scale, then cap, then root) and the numbers are those of
    seqio.mixing_rate_num_examples. temperature 1 is proportional, a high one nearly uniform.
    Source: Arivazhagan et al. 2019, "Massively Multilingual NMT in the Wild", section 4.2.
    """
    check_sizes(sizes)
    capped = {
        n: size * scale if maximum is None else min(size * scale, maximum)
        for n, size in sizes.items()
    }
    return normalized({name: size ** (1.0 / temperature) for name, size in capped.items()})
