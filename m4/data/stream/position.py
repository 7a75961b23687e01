"""Where a stream stands after a step: what it has given out, so that another one draws the rest."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m4.settings import InputError

Ints = npt.NDArray[np.int64]


class Place(NamedTuple):
    """Where one direction stands.

    text: SHA-256 of its language's training text. size: its pairs. seen: pairs given out, of all
    texts so far. drawn: how many draws of this text were given out. left: the draws that were
    passed over, because their group of steps was not finished: they come next, and after them draw
    `drawn + len(left)`, so that no pair comes twice before every other one came once.
    """

    text: str
    size: int
    seen: int = 0
    drawn: int = 0
    left: Sequence[int] = ()

    def draw(self, number: int) -> int:
        """Which draw the `number`-th is, counted from here on one by one."""
        place = number - self.drawn
        return self.left[place] if 0 <= place < len(self.left) else number


class Position(NamedTuple):
    """step: steps done. phases: how many there were. places: direction -> where it stands."""

    step: int
    phases: int
    places: Mapping[str, Place]

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes: a bit for each draw from the first that was passed over."""
        places = {
            name: [place.text, place.size, place.seen, place.drawn, *_bits(place.left)]
            for name, place in self.places.items()
        }
        return {"step": self.step, "phases": self.phases, "places": places}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Position:
        """ValueError: no position."""
        try:
            places = {
                name: Place(text, size, seen, drawn, _draws(*bits))
                for name, (text, size, seen, drawn, *bits) in saved["places"].items()
            }
            return cls(saved["step"], saved["phases"], places)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the stream's position is damaged ({error!r})") from error

    def place(self, direction: str, text: str, size: int) -> Place:
        """Where a direction continues. One whose text has changed begins a new epoch, in which each
        of its pairs comes once; a new one begins with its first."""
        place = self.places.get(direction, Place(text, size))
        if place.text == text:
            return place
        epochs = -(-(place.drawn + len(place.left)) // place.size)
        return Place(text, size, place.seen, epochs * size)


class Left(NamedTuple):
    """The draws that come first: of direction d draws[edges[d] : edges[d + 1]], in the place of the
    draws from first[d] on."""

    first: Ints
    edges: Ints
    draws: Ints

    @classmethod
    def of(cls, places: Sequence[Place]) -> Left:
        edges = np.cumsum([0, *(len(place.left) for place in places)])
        draws = np.array([draw for place in places for draw in place.left], np.int64)
        return cls(np.array([place.drawn for place in places], np.int64), edges, draws)

    def replace(self, directions: Ints, occurrences: Ints) -> Ints:
        """Which draw of its direction each is, where `occurrences` counts them one by one."""
        place = occurrences - self.first[directions]
        inside = place < np.diff(self.edges)[directions]
        replaced = occurrences.copy()
        replaced[inside] = self.draws[self.edges[directions[inside]] + place[inside]]
        return replaced


def _bits(draws: Sequence[int]) -> list[Any]:
    if not len(draws):
        return []
    marks = np.zeros(draws[-1] - draws[0] + 1, bool)
    marks[np.array(draws) - draws[0]] = True
    return [int(draws[0]), base64.b64encode(np.packbits(marks).tobytes()).decode()]


def _draws(first: int = 0, bits: str = "") -> list[int]:
    marks = np.unpackbits(np.frombuffer(base64.b64decode(bits), np.uint8))
    return (first + np.flatnonzero(marks)).tolist()
