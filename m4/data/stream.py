"""The training stream: (seed, step) -> batch, without state."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from m4.data.batches import (
    EOS_IDS,
    TAG_IDS,
    Batch,
    Examples,
    Ints,
    SplitReader,
    first_fit_decreasing,
    lay_out,
)
from m4.data.batches import evaluation_batches as evaluation_batches
from m4.data.cache import Cache
from m4.data.draws import Draws

# Raised whenever the same arguments would give other batches.
FORMAT = 1
_GROUP_ROWS, _GROUP_STEPS = 512, 4
_FILLS = [percent / 100 for percent in range(97, 29, -1)]
_TRIAL_GROUPS = 3


class Stream:
    """Batches of training pairs; `batch(step)` is a pure function of the arguments and `step`.

    Steps are planned in groups of at least 512 rows. A group owns a fixed number of draws, so
    that its first draw is known without any other group; inside it the steps take the draws in
    their order, each its part of the load that is left. So a step's pairs are a stretch of the
    draws: every pair of a direction comes once before any comes twice. What does not fit in a
    group's last step is left out and counted (`dropped`); the number of draws is the largest for
    which that does not happen in a few groups that are tried at the start.
    """

    def __init__(
        self,
        cache: Cache,
        directions: Sequence[str] | None = None,
        rates: Mapping[str, float] | None = None,
        seed: int = 0,
        batch_rows: int = 16,
        source_length: int | None = None,
        target_length: int | None = None,
        pack: bool = True,
    ) -> None:
        """directions and rates default to those of the cache's mixture, lengths to the cache's.

        rates need not sum to 1. ValueError for a direction without rate and for lengths below
        the longest training pair.
        """
        shares = dict(rates) if rates is not None else cache.rates()
        self.directions = list(directions) if directions is not None else list(shares)
        if missing := [d for d in self.directions if d not in shares]:
            raise ValueError(
                f"no rate for {', '.join(missing)}; there are rates for {', '.join(shares)}"
            )
        self.seed, self.batch_rows, self.pack = seed, batch_rows, pack
        self.source_length = source_length or cache.source_length
        self.target_length = target_length or cache.target_length
        if batch_rows < 1:
            raise ValueError(f"batch_rows is {batch_rows}: must be at least 1")
        self._split = SplitReader(cache, self.directions, "train")
        self._check_lengths(cache)
        self._draws = Draws(
            self.directions, self._split.sizes, [shares[d] for d in self.directions], seed
        )
        self._cache_fingerprint = cache.fingerprint
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        self._lock = threading.Lock()
        self.group_steps = max(_GROUP_STEPS, -(-_GROUP_ROWS // batch_rows)) if pack else 1
        self.group_pairs = self._most_pairs(cache) if pack else batch_rows

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step, see batches.lay_out; `rows` of it for one of several hosts."""
        assert step >= 0, step
        with self._lock:
            examples, row_of = self._group(step).step(step % self.group_steps)
        start, stop, stride = rows.indices(self.batch_rows)
        assert stride == 1, rows
        mine = (row_of >= start) & (row_of < stop)
        return lay_out(
            examples.take(mine),
            row_of[mine] - start,
            stop - start,
            self.source_length,
            self.target_length,
            self._split.english,
            self._split.foreign,
            self._split.tags,
        )

    def examples_seen(self, step: int) -> dict[str, int]:
        """Pairs of each direction in the steps before `step` (left out ones are counted)."""
        with self._lock:
            seen = self._group(step).first + self._group(step).cursor(step % self.group_steps)
        return dict(zip(self.directions, self._draws.counts(seen), strict=True))

    def epochs(self, step: int) -> dict[str, float]:
        """How often each direction's pairs were seen in the steps before `step`."""
        seen = self.examples_seen(step)
        return {d: seen[d] / n for d, n in zip(self.directions, self._split.sizes, strict=True)}

    def dropped(self, step: int) -> int:
        """Pairs that did not fit in the group whose last step is `step`; 0 for other steps."""
        if (step + 1) % self.group_steps:
            return 0
        with self._lock:
            return self._group(step).dropped()

    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the batches."""
        parts = [
            FORMAT,
            self._cache_fingerprint,
            self.directions,
            self._split.sizes,
            self._draws.bounds,
            self.seed,
            [self.batch_rows, self.source_length, self.target_length, self.pack],
            [self.group_steps, self.group_pairs],
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _check_lengths(self, cache: Cache) -> None:
        for code in dict.fromkeys(self._split.codes):
            longest = max(cache.longest(code).values())
            for name, length, needed in (
                ("source_length", self.source_length, longest + TAG_IDS + EOS_IDS),
                ("target_length", self.target_length, longest + EOS_IDS),
            ):
                if length < needed:
                    raise ValueError(
                        f"{name} is {length}, but a training sentence of {code!r} needs {needed} "
                        f"ids (make the cache with cache.prepare.{name} = {length})"
                    )

    def _most_pairs(self, cache: Cache) -> int:
        """Draws a group: the largest number of which nothing is left over in the trials."""
        shares = np.diff(np.array(self._draws.bounds, np.float64))
        shares /= shares.sum()
        means = np.array([cache.mean_pieces(d, "train") for d in self.directions])
        source, target = shares @ means + (TAG_IDS + EOS_IDS, EOS_IDS)
        rows = self.group_steps * self.batch_rows
        most = rows * min(self.source_length / source, self.target_length / target)
        for fill in _FILLS:
            pairs = max(int(fill * most), rows)
            # Any groups will do, but at the beginning of training their blocks are needed anyway.
            if not any(_Group(self, n * pairs, pairs).dropped() for n in range(_TRIAL_GROUPS)):
                break
        return pairs

    def _group(self, step: int) -> _Group:
        number = step // self.group_steps
        if number not in self._groups:
            self._groups[number] = _Group(self, number * self.group_pairs, self.group_pairs)
            while len(self._groups) > 2:
                self._groups.popitem(last=False)
        return self._groups[number]


class _Group:
    """The plan of consecutive steps, made step by step as they are asked for."""

    def __init__(self, stream: Stream, first: int, pairs: int) -> None:
        self.stream, self.first = stream, first
        self.examples = stream._split.examples(*stream._draws.draw(first, first + pairs))
        load = (
            self.examples.source_lengths / stream.source_length
            + self.examples.target_lengths / stream.target_length
        )
        self.load = np.concatenate([np.zeros(1), np.cumsum(load)])
        self.cursors, self.rows = [0], list[Ints]()

    def cursor(self, step: int) -> int:
        """The first draw of the group's step `step`, counted from the group's first."""
        while len(self.cursors) <= step:
            self._plan()
        return self.cursors[step]

    def step(self, step: int) -> tuple[Examples, Ints]:
        """The pairs of a step and the row of each."""
        start, stop = self.cursor(step), self.cursor(step + 1)
        kept = self.rows[step] >= 0
        return self.examples.take(slice(start, stop)).take(kept), self.rows[step][kept]

    def dropped(self) -> int:
        self.cursor(self.stream.group_steps)
        return int((self.rows[-1] < 0).sum())

    def _plan(self) -> None:
        start, steps_left = self.cursors[-1], self.stream.group_steps - len(self.rows)
        stop = len(self.load) - 1
        if not self.stream.pack:
            rows = np.arange(stop)
        elif steps_left == 1:
            rows = self._pack(start, stop)
        else:
            share = self.load[start] + (self.load[-1] - self.load[start]) / steps_left
            wanted = int(np.searchsorted(self.load, share, side="right")) - 1
            # As many pairs as rows always fit: every step, this one and later ones, gets them.
            least = self.stream.batch_rows
            stop = min(max(wanted, start + least), stop - least * (steps_left - 1))
            # The last draws wait for the next step, so that no draw overtakes another.
            while (left := int(((rows := self._pack(start, stop)) < 0).sum())) > 0:
                stop -= left
        self.cursors.append(stop)
        self.rows.append(rows)

    def _pack(self, start: int, stop: int) -> Ints:
        return first_fit_decreasing(
            self.examples.source_lengths[start:stop],
            self.examples.target_lengths[start:stop],
            self.stream.batch_rows,
            self.stream.source_length,
            self.stream.target_length,
        )
