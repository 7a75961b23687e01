"""Temperature sampling: p proportional to n^(1/T)."""

from __future__ import annotations

from m4.data.samplers import check_sizes, normalized


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
    check_sizes(sizes)
    if not temperature >= 1.0:
        raise ValueError(
            f"temperature is {temperature}: must be at least 1 "
            "(temperature.temperature.temperature)"
        )
    for name, value in (("scale", scale), ("maximum", maximum)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value}: must be above 0 (temperature.temperature.{name})")
    capped = {
        n: size * scale if maximum is None else min(size * scale, maximum)
        for n, size in sizes.items()
    }
    return normalized({name: size ** (1.0 / temperature) for name, size in capped.items()})
