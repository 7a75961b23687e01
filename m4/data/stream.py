"""The training stream: (seed, step) -> batch, without state."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from m4.data.batches import EOS_IDS, TAG_IDS, Batch, Examples, SplitReader, lay_out
from m4.data.batches import evaluation_batches as evaluation_batches
from m4.data.cache import Cache
from m4.data.draws import Draws
from m4.data.packing import TRIES, Plan, Shape, plan
from m4.data.samplers.temperature import temperature

# Raised whenever the same arguments would give other batches.
FORMAT = 1
_GROUP_ROWS, _GROUP_STEPS = 512, 4
# Of the planned load to what the rows hold. What is lost: no packing is perfect, and a step has
# more of sources or more of targets.
_FILLS = [percent / 100 for percent in range(99, 0, -1)]
# Trials are few, so plans have something to spare: more tries, and 1 % fewer pairs than the trials
# held. In 1,800 groups of real text nothing was left out (without the 1 %: in 1 group of 50).
_TRIAL_GROUPS, _TRIAL_TRIES, _SPARE = 4, 2, 0.99


class Stream:
    """Batches of training pairs; `batch(step)` is a pure function of the arguments and `step`.

    Steps are planned in groups of at least 512 rows. A group owns a fixed number of draws, so
    that its first draw is known without any other group; inside it the steps take the draws in
    their order, each its part of the load that is left. So a step's pairs are a stretch of the
    draws: every pair of a direction comes once before any comes twice. The number of draws is
    nearly the largest for which all pairs fit in a few groups that are tried at the start; where
    they do not fit later, the rest is left out and counted (`dropped`).
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
        """directions default to those of the cache's mixture, lengths to the cache's.

        rates: direction -> share of the pairs, need not sum to 1; default: temperature(T=5).
        ValueError for a direction without rate and for lengths below the longest training pair.
        """
        shares = dict(rates) if rates is not None else temperature(cache.sizes())
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
        group, place = self._group(step), step % self.group_steps
        row_of = group.plan.rows[place]
        pairs = slice(group.plan.cursors[place], group.plan.cursors[place + 1])
        start, stop, stride = rows.indices(self.batch_rows)
        assert stride == 1, rows
        mine = (row_of >= start) & (row_of < stop)
        return lay_out(
            group.examples.take(pairs).take(mine),
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
        group = self._group(step)
        seen = group.first + group.plan.cursors[step % self.group_steps]
        return dict(zip(self.directions, self._draws.counts(seen), strict=True))

    def epochs(self, step: int) -> dict[str, float]:
        """How often each direction's pairs were seen in the steps before `step`."""
        seen = self.examples_seen(step)
        return {d: seen[d] / n for d, n in zip(self.directions, self._split.sizes, strict=True)}

    def dropped(self, step: int) -> int:
        """Pairs that did not fit in the group whose last step is `step`; 0 for other steps."""
        if (step + 1) % self.group_steps:
            return 0
        return self._group(step).plan.left

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
        """Draws a group: nearly the largest number of which nothing was left over in the trials."""
        shares = np.diff(np.array(self._draws.bounds, np.float64))
        shares /= shares.sum()
        means = np.array([cache.mean_pieces(d, "train") for d in self.directions])
        source, target = shares @ means + (TAG_IDS + EOS_IDS, EOS_IDS)
        rows = self.group_steps * self.batch_rows
        most = rows * min(self.source_length / source, self.target_length / target)
        for fill in _FILLS:
            pairs = max(int(fill * most), rows)
            # Any groups will do, but at the beginning of training their blocks are needed anyway.
            trials = (self._plan(n * pairs, pairs, _TRIAL_TRIES) for n in range(_TRIAL_GROUPS))
            if not any(trial.plan.left for trial in trials):
                break
        return max(int(_SPARE * pairs), rows)

    def _group(self, step: int) -> _Group:
        """The group of a step, planned now or one of the last two that were."""
        number = step // self.group_steps
        with self._lock:  # a thread that loads ahead may ask, and the loop for examples_seen
            if number not in self._groups:
                self._groups[number] = self._plan(number * self.group_pairs, self.group_pairs)
                while len(self._groups) > 2:
                    self._groups.popitem(last=False)
            return self._groups[number]

    def _plan(self, first: int, pairs: int, tries: int = TRIES) -> _Group:
        examples = self._split.examples(*self._draws.draw(first, first + pairs))
        if not self.pack:
            return _Group(first, examples, Plan([0, pairs], [np.arange(pairs)]))
        lengths = examples.source_lengths, examples.target_lengths
        shape = Shape(self.batch_rows, self.source_length, self.target_length)
        return _Group(first, examples, plan(*lengths, self.group_steps, shape, tries))


class _Group(NamedTuple):
    """Consecutive steps: their first draw, their pairs, and where those go."""

    first: int
    examples: Examples
    plan: Plan
