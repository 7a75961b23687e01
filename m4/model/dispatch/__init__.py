"""Transports, one file each: x_GSM, Routing, experts (EGCM -> EGCM) -> y_GSM, by several roads."""

from collections.abc import Callable
from typing import Protocol

from m4.model.routing import Array, Routing

Experts = Callable[[Array], Array]


class Transport(Protocol):
    """Sends tokens to their seats, lets experts work on [E, G, C, M], brings the sum back."""

    def __call__(self, x_GSM: Array, routing: Routing, experts: Experts) -> Array: ...
