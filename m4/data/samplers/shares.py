"""Shares: some directions have given shares of the draws, another sampler divides the rest."""

import dataclasses
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated

from m4.data.samplers import Planned, Sampler, check_sizes, normalized
from m4.data.samplers.learned import Learned
from m4.data.samplers.temperature import temperature
from m4.settings import Between, SettingError, checked

_Share = Annotated[float, Between(0, 1)]


@checked
@dataclasses.dataclass(frozen=True)
class Shares:
    """Another sampler's rates, with given shares for the directions that match a pattern.

    Within a pattern, and among the directions that match none, rates keep their proportions.

    Attributes:
        sampler: Rates of all directions. It is not told what the run draws.
        shares: Pattern -> share of the draws of all directions that match it together, such as
            {"gl-en": 0.7} or {"*-en": 0.5}. A direction counts for the first pattern that it
            matches. Directions that match none share what is left; if all match one, the shares
            are divided by their sum.

    Raises:
        SettingError: The sampler is a schedule, which can have this one in its phases, or learns,
            which can start from this one; the shares are more than 1; a pattern matches nothing.
    """

    shares: Mapping[str, _Share]
    sampler: Sampler = temperature

    def __post_init__(self) -> None:
        if isinstance(self.sampler, (Planned, Learned)):
            allowed = "neither a schedule nor one that learns"
            raise SettingError("Shares.sampler", self.sampler, allowed)
        if math.fsum(self.shares.values()) > 1 + 1e-9:
            raise SettingError("Shares.shares", dict(self.shares), "shares of at most 1 together")

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]:
        """Returns the rates of all directions, which sum to 1."""
        check_sizes(sizes)
        rates = self.sampler(sizes)
        kinds: dict[str | None, dict[str, float]] = {}
        for name, rate in rates.items():
            matched = (pattern for pattern in self.shares if fnmatchcase(name, pattern))
            kinds.setdefault(next(matched, None), {})[name] = rate
        if unused := self.shares.keys() - kinds.keys():
            allowed = f"patterns that match a direction of {', '.join(sizes)}"
            raise SettingError("Shares.shares", sorted(unused), allowed)
        given = {**self.shares, None: 1 - math.fsum(self.shares.values())}
        divided = {name: given[kind] * rate for kind, one in kinds.items()
                   for name, rate in normalized(one).items()}  # fmt: skip
        return normalized({name: divided[name] for name in rates})
