"""Samplers decide how often each direction is drawn: plain functions, one per file."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

from m4.settings import InputError, SettingError, shown


class Sampler(Protocol):
    """Function from the sizes of directions' training data to rates that sum to 1.

    Sizes and rates are in one unit: pairs or tokens (`m4.data.stream.mixture`). A sampler with the
    parameter `drawn` also gets the number that the whole run draws, in that unit; one with `rates`
    gets those of the corpus's source, or None.
    """

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]: ...


class Phase(NamedTuple):
    """Rates from `first_step` on; directions without a rate are not drawn."""

    first_step: int
    rates: dict[str, float]


@runtime_checkable
class Planned(Protocol):
    """A sampler whose rates change at given steps; a call returns those of the first phase."""

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]: ...
    def plan(self, sizes: dict[str, int]) -> list[Phase]: ...


def plan(sampler: Sampler, sizes: dict[str, int]) -> list[Phase]:
    """Returns the phases of any sampler: one from step 0 on, unless it plans them."""
    if isinstance(sampler, Planned):
        return sampler.plan(sizes)
    rates: Any = sampler(sizes)
    fits = isinstance(rates, Mapping) and {*rates} <= {*sizes} and any(rates.values()) and all(
        isinstance(rate, Real) and 0 <= float(rate) < math.inf for rate in rates.values()
    )  # fmt: skip
    if not fits:
        example = {name: 1 / len(sizes) for name in list(sizes)[:2]}
        allowed = f"a function that returns rates by direction, such as {example}; it returned"
        raise SettingError("Data.sampler", sampler, f"{allowed} {shown(rates)}")
    return [Phase(0, dict(rates))]


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raises InputError if there is nothing to sample from, or a direction has no data."""
    if not sizes:
        raise InputError("no directions to sample from (CorpusSpec.languages)")
    if empty := [name for name, size in sizes.items() if size <= 0]:
        raise InputError(f"no examples to sample from in {', '.join(empty)}")


def normalized(weights: Mapping[str, float]) -> dict[str, float]:
    """Returns weights divided by their sum."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def matching(languages: Sequence[str], directions: Sequence[str], setting: str) -> list[str]:
    """Returns the directions of languages: 'gl' means en-gl and gl-en, 'en-gl' only itself.

    Raises:
        SettingError: One of them is neither a language nor a direction here.
    """
    chosen = set()
    for name in languages:
        found = [d for d in directions if name == d or (name in d.split("-") and name != "en")]
        if not found:
            known = [code for d in directions for code in d.split("-") if code != "en"]
            allowed = f"a language or direction of {', '.join(dict.fromkeys(known))}"
            raise SettingError(setting, name, allowed)
        chosen.update(found)
    return [d for d in directions if d in chosen]


@dataclasses.dataclass(frozen=True)
class Kept:
    """Another sampler's rates, separately for kept directions and all others (`Data.keep`).

    Attributes:
        sampler: Sampler for rates among the kept directions, and among the others.
        keep: Kept languages or directions.
        share: Share of all draws for kept directions with training pairs; with 0, the others are
            drawn as if there were no kept ones.
    """

    sampler: Sampler
    keep: Sequence[str]
    share: float

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]:
        """Returns the rates of all directions, which sum to 1. Raises SettingError without text."""
        kept = kept_of(self.keep, [*sizes])
        new = {name: size for name, size in sizes.items() if name not in kept}
        old = {name: sizes[name] for name in kept if sizes[name]}
        if self.share and not old:
            raise SettingError("Data.keep_share", self.share, "0: no kept direction has text")
        rates = dict.fromkeys(sizes, 0.0)
        for part, share in ((new, 1 - self.share), (old, self.share)):
            if share:
                rates |= {name: share * rate for name, rate in self.sampler(part).items()}
        return rates


def kept_of(keep: Sequence[str], directions: Sequence[str]) -> list[str]:
    """Returns the directions that `keep` names. Raises SettingError for unknown ones, or all."""
    kept = matching(keep, directions, "Data.keep")
    if kept and len(kept) == len(directions):
        raise SettingError("Data.keep", keep, "some of the directions, so that one is trained")
    return kept
