"""Resource levels and sides of directions, over which differences are averaged."""

from dataclasses import dataclass
from typing import Annotated

from m4.data.directions import FROM_ENGLISH, TO_ENGLISH, WITHOUT_ENGLISH
from m4.settings import MUTABLE, Count, SettingError, checked

LEVELS = ("high", "medium", "low")
SIDES = (TO_ENGLISH, FROM_ENGLISH, WITHOUT_ENGLISH)


@checked
@dataclass(frozen=True)
class ResourceLevels:
    """Training pairs from which a language is high-resource, or below which it is low-resource.

    Attributes:
        high_resource_from: Least training pairs of a high-resource language.
        low_resource_below: A language with fewer training pairs is low-resource.
        min_test_sentences: A direction with fewer is reported, but in no mean, trend or axis.
    """

    high_resource_from: Annotated[Count, MUTABLE] = 3000
    low_resource_below: Annotated[Count, MUTABLE] = 1000
    min_test_sentences: Annotated[Count, MUTABLE] = 50

    def __post_init__(self) -> None:
        if self.low_resource_below > self.high_resource_from:
            most = f"at most high_resource_from = {self.high_resource_from}"
            raise SettingError("ResourceLevels.low_resource_below", self.low_resource_below, most)

    def of(self, train_pairs: int) -> str:
        """Returns the resource level of a language with this many training pairs."""
        if train_pairs >= self.high_resource_from:
            return "high"
        return "low" if train_pairs < self.low_resource_below else "medium"


DEFAULT_LEVELS = ResourceLevels()
