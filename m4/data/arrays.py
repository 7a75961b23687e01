"""Names of numpy array types."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.integer]
Ints = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
U8, U32, U64 = npt.NDArray[np.uint8], npt.NDArray[np.uint32], npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
