"""Sides: the share of what is drawn that goes out of English."""

from __future__ import annotations

import dataclasses

from m4.data.preprocess import split_direction
from m4.data.samplers import Planned, Sampler, check_sizes, normalized
from m4.data.samplers.learned import Learned
from m4.data.samplers.temperature import temperature


@dataclasses.dataclass(frozen=True)
class Sides:
    """Another sampler's rates, with a given share for all directions out of English together.

    All directions into English teach one language to the decoder, those out of it as many as there
    are: at equal shares the first are learned long before the second (as in Arivazhagan et al.
    2019, "Massively Multilingual NMT in the Wild", where any-to-English gains more than
    English-to-any). Within a side the rates keep their proportions; where all directions are of one
    side, they stay as they are.

    Attributes:
        sampler: rates of all directions. out_of_english: in (0, 1).

    Raises:
        ValueError: the share is out of range; the sampler is a schedule, which can have this one in
            its phases, or learns, which can start from this one. The sampler is not told what the
            run draws: unimax needs a budget of its own here, and its bound on repeats does not
            hold, since a side's rates rise with its share.
    """

    sampler: Sampler = temperature
    out_of_english: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.sampler, (Planned, Learned)):
            raise ValueError("sides.Sides.sampler: neither a schedule nor one that learns")
        if not 0 < self.out_of_english < 1:
            raise ValueError(
                f"sides.Sides.out_of_english = {self.out_of_english}: must be between 0 and 1"
            )

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]:
        """The rates of all directions; they sum to 1."""
        check_sizes(sizes)
        rates = self.sampler(sizes)
        out = {name for name in rates if split_direction(name)[0] == "en"}
        sides = (({*rates} - out, 1 - self.out_of_english), (out, self.out_of_english))
        shares = {
            name: share * rate
            for side, share in sides
            for name, rate in normalized({name: rates[name] for name in side}).items()
        }
        return normalized({name: shares[name] for name in rates})
