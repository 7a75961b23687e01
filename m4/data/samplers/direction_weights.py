"""Direction weights: a given share of the draws is from English."""

import dataclasses
from typing import Annotated

from m4.data.preprocess import split_direction
from m4.data.samplers import Planned, Sampler, check_sizes, normalized
from m4.data.samplers.learned import Learned
from m4.data.samplers.temperature import temperature
from m4.settings import Between, SettingError, checked


@checked
@dataclasses.dataclass(frozen=True)
class DirectionWeights:
    """Another sampler's rates, with a given share for all directions from English together.

    All directions to English teach the decoder one language, those from English as many as there
    are: at equal shares the first are learned long before the second (as in Arivazhagan et al.
    2019, "Massively Multilingual NMT in the Wild", where any-to-English gains more than
    English-to-any). Among the directions from English, and among those to English, the rates keep
    their proportions; where there is one kind alone, they stay as they are.

    Attributes:
        sampler: Rates of all directions. It is not told what the run draws: unimax needs its own
            budget here, and its bound on repeats does not hold, since rates rise with their share.
        from_english: Share in (0, 1).

    Raises:
        SettingError: The sampler is a schedule, which can have this one in its phases, or learns,
            which can start from this one.
    """

    sampler: Sampler = temperature
    from_english: Annotated[float, Between(0, 1, above=True, below=True)] = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.sampler, (Planned, Learned)):
            raise SettingError(
                "DirectionWeights.sampler", self.sampler, "neither a schedule nor one that learns"
            )

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]:
        """Returns the rates of all directions, which sum to 1."""
        check_sizes(sizes)
        rates = self.sampler(sizes)
        out = {name for name in rates if split_direction(name)[0] == "en"}
        kinds = (({*rates} - out, 1 - self.from_english), (out, self.from_english))
        shares = {
            name: share * rate
            for kind, share in kinds
            for name, rate in normalized({name: rates[name] for name in kind}).items()
        }
        return normalized({name: shares[name] for name in rates})
