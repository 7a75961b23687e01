"""Mixing rates: the rates that the corpus's source gives, such as those of a seqio Mixture."""

from collections.abc import Mapping

from m4.data.samplers import check_sizes, normalized
from m4.settings import InputError, configurable


@configurable
def mixing_rates(
    sizes: dict[str, int], rates: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Returns the rates of the corpus (`Cache.source_rates`), divided by their sum.

    They are shares of pairs, and not available inside another sampler.
    """
    check_sizes(sizes)
    if rates is None:
        raise InputError(
            "mixing_rates: the corpus's source gives no rates, as seqio_tasks.SeqioTasks does "
            "(Data.sampler); inside of another sampler it never gets them"
        )
    if not any(rates.get(name, 0) > 0 for name in sizes):
        raise InputError(f"mixing_rates: no direction of {', '.join(sizes)} has a rate")
    return normalized({name: rates.get(name, 0.0) for name in sizes})
