"""A share of the draws for directions of an old model, so that a new one does not forget them."""

import dataclasses
from collections.abc import Sequence

from m4.data.samplers import Sampler, matching
from m4.settings import SettingError


@dataclasses.dataclass(frozen=True)
class Kept:
    """Another sampler's rates, apart for kept directions and all others (`Data.keep`).

    Attributes:
        sampler: Rates among the kept directions, and among the others.
        keep: Languages or directions that are kept.
        share: Share of the draws for kept directions that have training pairs, together; 0 does
            not train on them, and leaves the others their draws as if there were no kept ones.
    """

    sampler: Sampler
    keep: Sequence[str]
    share: float

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]:
        """Returns the rates of all directions, which sum to 1. SettingError: none has text."""
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
    """Returns the directions that `keep` names. SettingError: an unknown one, or all of them."""
    kept = matching(keep, directions, "Data.keep")
    if kept and len(kept) == len(directions):
        raise SettingError("Data.keep", keep, "some of the directions, so that one is trained")
    return kept
