"""Shares: fixed shares of the draws for some directions; another sampler divides the rest."""

import dataclasses
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated

from m4.data.samplers import Planned, Sampler, check_sizes, normalized
from m4.data.samplers.learned import Learned
from m4.data.samplers.temperature import temperature
from m4.settings import Between, SettingError, checked


@checked
@dataclasses.dataclass(frozen=True)
class Shares:
    """Another sampler's rates, with fixed shares for directions that match a pattern.

    {"en-*": 0.5} gives half of the draws to the directions from English: those to English teach the
    decoder one language, and are learned long before the others at equal shares (Arivazhagan et al.
    2019, "Massively Multilingual NMT in the Wild", where any-to-English gains more than
    English-to-any). {"gl~bt-en": 0.2} is for back-translations.

    Attributes:
        shares: Pattern -> total share of the directions that match it. A direction counts for the
            first pattern that it matches, and keeps its proportion to others there. The rest is for
            directions without a match, in proportion. If there are none, or a pattern with *
            matches none, the other shares are divided by their sum.
        sampler: Sampler for rates of all directions. It does not learn what the run draws: unimax
            needs a budget here, and its bound on repeats fails, as rates rise with their share.

    Raises:
        SettingError: The sampler is a schedule, which can have this one in its phases, or learns,
            which can start from this one; shares are above 1 together; a direction is not there.
    """

    shares: Mapping[str, Annotated[float, Between(0, 1)]] = dataclasses.field(default_factory=dict)
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
        parts: dict[str | None, dict[str, float]] = {}
        for name, rate in rates.items():
            matched = (pattern for pattern in self.shares if fnmatchcase(name, pattern))
            parts.setdefault(next(matched, None), {})[name] = rate
        if missing := [name for name in self.shares if name not in parts and "*" not in name]:
            allowed = f"a direction of {', '.join(sizes)}, or a pattern with *"
            raise SettingError("Shares.shares", missing[0], allowed)
        given = {**self.shares, None: max(0.0, 1 - math.fsum(self.shares.values()))}
        shares = {
            name: given[pattern] * rate
            for pattern, part in parts.items()
            for name, rate in normalized(part).items()
        }
        if not any(shares.values()):
            raise SettingError("Shares.shares", dict(self.shares), "a share for a direction here")
        return normalized({name: shares[name] for name in rates})
