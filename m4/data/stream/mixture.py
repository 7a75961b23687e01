"""Conversion of a sampler's rates to the phases of pairs that the stream draws.

A sampler counts pairs ("examples") or tokens ("tokens"). With tokens, sizes are tokens and rates
are shares of tokens; pairs are drawn at share / mean tokens per pair, so that a language with long
sentences is drawn less often. Tokens are the ids of source and target, with tag and eos.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from m4.data.cache.cache import Cache
from m4.data.directions import Mixture, directions_of
from m4.data.samplers import Phase, Sampler, normalized, plan
from m4.data.samplers.proportional import proportional
from m4.data.stream.stream import Stream
from m4.settings import InputError, OneOf, check_value

# Rates hardly change the number of pairs per step, so two rounds suffice for most corpora.
_ROUNDS, _MORE = 8, 1.0005
UNITS = ("examples", "tokens")
Unit = Annotated[str, OneOf(UNITS)]


def pair_tokens(cache: Cache, direction: str) -> float:
    """Returns the mean length of a training pair, source and target, with tag and eos."""
    return sum(cache.mean_pieces(direction)) + sum(cache.extra_ids)


def units(cache: Cache, sample_by: str, mixture: Mixture | None = None) -> dict[str, float]:
    """Returns the mean size of a pair of each direction, in the sampler's unit."""
    check_value("make_stream.sample_by", sample_by, Unit)
    names = directions_of(mixture or cache.mixture, cache.language_pairs())
    if sample_by == "examples":
        return dict.fromkeys(names, 1.0)
    return {direction: pair_tokens(cache, direction) for direction in names}


def sizes(cache: Cache, sample_by: str) -> dict[str, int]:
    """Returns the number of training pairs or tokens of each direction, for a sampler."""
    unit = units(cache, sample_by)
    return {direction: round(pairs * unit[direction]) for direction, pairs in cache.sizes().items()}


def pair_rates(shares: Mapping[str, float], unit: Mapping[str, float]) -> dict[str, float]:
    """Converts a sampler's rates to shares of pairs, without directions of rate 0."""
    return normalized({name: rate / unit[name] for name, rate in shares.items() if rate > 0})


def phases(
    cache: Cache, sampler: Sampler, sample_by: str = "examples", drawn: float | None = None
) -> list[Phase]:
    """Returns shares of pairs by phase; `drawn` is the total that training draws, in the unit."""
    known = {"drawn": drawn, "rates": cache.source_rates}
    wanted = {n: v for n, v in known.items() if takes(sampler, n) and (n, v) != ("drawn", None)}
    informed: Any = functools.partial(sampler, **wanted) if wanted else sampler
    made = plan(informed, sizes(cache, sample_by))
    unit = units(cache, sample_by)
    return [Phase(first_step, pair_rates(rates, unit)) for first_step, rates in made]


def takes(sampler: Sampler, name: str) -> bool:
    """Returns whether a sampler has the parameter "drawn" or "rates"."""
    return name in inspect.signature(sampler).parameters


def make_stream(
    cache: Cache, sampler: Sampler, sample_by: str = "examples", total_steps: int = 1,
    stream: Callable[..., Stream] = Stream, **options: Any,
) -> Stream:  # fmt: skip
    """Returns the training stream of a sampler.

    The number of pairs in a step depends on their lengths, and so on the rates, and the rates of a
    sampler like UniMax depend on the number of pairs. This function finds both: the sampler gets at
    least the number that the stream draws in `total_steps`, and at most about 1% more.

    Args:
        sample_by: Unit of sizes and rates, "examples" or "tokens".
        **options: Arguments of the stream, such as seed, rows and lengths.

    Raises:
        InputError: A phase never begins, or no rates agree with the pairs drawn.
    """
    if not takes(sampler, "drawn"):
        planned = phases(cache, sampler, sample_by)
        made = stream(cache, phases=planned, **options)
        _check_they_begin(planned, made, total_steps)
        return made
    unit = units(cache, sample_by)
    made = stream(cache, phases=phases(cache, proportional, sample_by), **options)
    at_most = 0.0
    for _ in range(_ROUNDS):  # at_most only increases, so this ends
        at_most = max(at_most, _drawn(made, total_steps, unit) * _MORE)
        made = stream(cache, phases=phases(cache, sampler, sample_by, at_most), **options)
        if _drawn(made, total_steps, unit) <= at_most:
            return made
    raise InputError(
        f"no rates after {_ROUNDS} tries: the sampler's rates change how many pairs "
        f"{total_steps} steps hold, and that changes the rates; give it a budget"
    )


def _check_they_begin(planned: Sequence[Phase], stream: Stream, total_steps: int) -> None:
    """Raises InputError for a phase in which training draws no span of steps."""
    span = stream.span_steps
    starts = [-(-phase.first_step // span) * span for phase in planned]
    for phase, start, after in zip(planned, starts, [*starts[1:], -1], strict=True):
        if phase.first_step < total_steps and (start >= total_steps or start == after):
            never = f"the sampler's phase from step {phase.first_step} never begins"
            why = f"phases change at multiples of {span} steps"
            last = f"training has {total_steps}" if start >= total_steps else ""
            raise InputError(f"{never}: {why}, and {last or f'the next one begins at {after} too'}")


def _drawn(stream: Stream, total_steps: int, unit: Mapping[str, float]) -> float:
    """Returns how much the stream draws before `total_steps`, in the sampler's unit."""
    seen = stream.examples_seen(total_steps)
    return sum(pairs * unit[direction] for direction, pairs in seen.items())
