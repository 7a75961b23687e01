"""The trend line of a plot over languages: the mean of a sliding window (GShard, Figure 6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def window_size(languages: int, window: int = 10) -> int:
    """The sliding window for so many languages: `window`, but at most a quarter of them (12
    languages: 3, 24: 6, from 40 on: 10), so that the trend keeps both ends of the range apart.
    Fewer than 8 languages have no trend (a window of 1)."""
    return max(1, min(window, languages // 4))


def trend(values: Sequence[float], window: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean of every `window` consecutive values and the middle of each window: only windows
    that lie wholly inside, so no end is a mean of fewer. NaN marks what is missing."""
    if window < 2 or len(values) < window:
        return np.zeros(0), np.zeros(0)
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(values, float), window)
    there = ~np.isnan(windows)
    kept = there.any(axis=1)
    means = np.where(there, windows, 0).sum(axis=1)[kept] / there.sum(axis=1)[kept]
    return (np.arange(len(windows)) + (window - 1) / 2)[kept], means
