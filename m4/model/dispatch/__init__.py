"""Transports, one file each: x_GSM, Routing, experts -> y_GSM, the same result by several roads."""

from typing import Protocol

from m4.model.experts import Experts
from m4.model.routing import Array, Routing


class Transport(Protocol):
    """Sends tokens to their seats, lets experts work on [E, G, C, M], brings the sum back.

    y_GSM = sum over choices that have a seat of weight * expert(x); 0 for a token without any.
    """

    def __call__(self, x_GSM: Array, routing: Routing, experts: Experts) -> Array: ...
