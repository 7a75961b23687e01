"""Transports bring tokens to their experts and back: one a file, all with the same result."""

from typing import Protocol

from m4.model.feed_forward import Experts
from m4.model.routing import Array, Routing


class Transport(Protocol):
    """Sends tokens to their slots, lets the experts work on them and brings the results back.

    y_GSM = sum over a token's choices with a slot of weight * expert(x); 0 for a token without any.
    """

    def __call__(self, x_GSM: Array, routing: Routing, experts: Experts) -> Array: ...
