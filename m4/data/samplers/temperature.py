"""Temperature sampling: p proportional to n^(1/T)."""

from __future__ import annotations


def temperature(
    sizes: dict[str, int],
    temperature: float = 5.0,
    scale: float = 1.0,
    maximum: float | None = None,
) -> dict[str, float]:
    """Rates min(n * scale, maximum) ** (1 / temperature), divided by their sum.

    The order (scale, then cap, then root) and the numbers are those of
    seqio.mixing_rate_num_examples. temperature 1 is proportional, infinity uniform.
    Source: Arivazhagan et al. 2019, "Massively Multilingual NMT in the Wild", section 4.2.
    """
    if not temperature >= 1.0:
        raise ValueError(
            f"temperature is {temperature}: must be at least 1 "
            "(temperature.temperature.temperature)"
        )
    if empty := [name for name, size in sizes.items() if size <= 0]:
        raise ValueError(f"no examples to sample from in {', '.join(empty)}")
    capped = {
        n: size * scale if maximum is None else min(size * scale, maximum)
        for n, size in sizes.items()
    }
    rates = {name: size ** (1.0 / temperature) for name, size in capped.items()}
    total = sum(rates.values())
    return {name: rate / total for name, rate in rates.items()}
