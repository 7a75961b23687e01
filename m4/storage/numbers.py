"""Numbers of a model's arrays, checked where they come out of a file that may be anybody's."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m4.settings import InputError


def is_float(dtype: Any) -> bool:
    """Returns whether a dtype is one of floating-point numbers, bfloat16 included."""
    return jnp.issubdtype(dtype, jnp.floating)


def check_weights(where: object, arrays: Mapping[str, Any]) -> None:
    """Checks parameters, or moments of an optimizer; of arrays of JAX the parts of this process.

    Raises:
        InputError: One has numbers of another kind, or some that are not finite.
    """
    for name, array in arrays.items():
        if not is_float(array.dtype):
            raise InputError(f"{where}: {name} has numbers of type {array.dtype}: must be floats")
        parts = [array]
        if isinstance(array, jax.Array):  # devices with the same part have the same index
            parts = {str(one.index): one.data for one in array.addressable_shards}.values()
        if wrong := sum(int(np.size(p) - np.isfinite(np.asarray(p)).sum()) for p in parts):
            raise InputError(f"{where}: {name} has {wrong:,} values that are not finite")
