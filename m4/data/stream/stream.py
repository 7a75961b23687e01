"""The training stream: (seed, step) -> batch, without state."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, NamedTuple

import numpy as np

from m4.data.cache.cache import Cache
from m4.data.samplers import Phase
from m4.data.stream.batches import (
    TRIES,
    Batch,
    BatchPlan,
    Examples,
    Ints,
    Shape,
    SplitReader,
    lay_out,
    plan,
)
from m4.data.stream.draws import WINDOW, Draws, Phases, Stretch, listed
from m4.settings import (
    Between,
    Count,
    Given,
    InputError,
    OneOf,
    SettingError,
    Size,
    check_arguments,
    nearest_valid,
)

# Raised when the same arguments would give other batches.
FORMAT = 2
LAYOUTS = ("packed", "single")
# Minimum rows and steps of a group (window of steps). Larger groups vary less in load, so they
# can be filled better, but a group is planned at once.
_GROUP_ROWS, _GROUP_STEPS = 2048, 4
# Shares of the rows' room that a plan may use. The rest is lost, as no packing is perfect and the
# pairs of a step fill sources and targets unequally.
_FILLS = [percent / 100 for percent in range(99, 0, -1)]
# Trials are few, so plans get a margin: more tries, and fewer pairs than the trials held.
_TRIAL_GROUPS, _TRIAL_TRIES = 4, 2
_SPARE = 0.99
# Groups after which read pages are released: tens of megabytes per group.
_RELEASE_GROUPS = 128
# Number of groups whose shards are fetched from a bucket in advance.
_AHEAD_GROUPS = 2


class Stream:
    """Batches of training pairs; `batch(step)` is a pure function of the arguments and `step`.

    Steps are planned in windows, called groups. A group has a fixed number of draws, so that its
    first draw is known without any other group: nearly the largest number for which all pairs fit
    in a few trial groups at the beginning of a phase. Pairs that do not fit later are left out.

    The layout "packed" has several pairs per row; after every step, each pair of a direction was
    drawn once before any was drawn twice.
    """

    def __init__(
        self,
        cache: Annotated[Cache, Given("experiment.Data.corpus")],
        directions: Annotated[Sequence[str] | None, Given("corpus.CorpusSpec.mixture")] = None,
        phases: Annotated[
            Mapping[str, float] | Sequence[Phase] | None, Given("experiment.Data.sampler")
        ] = None,
        seed: Annotated[Count, Given("experiment.Training.seed")] = 0,
        batch_rows: Annotated[Size, Given("experiment.Training.batch_size")] = 16,
        source_length: Annotated[Size | None, Given("corpus.CorpusSpec.lengths")] = None,
        target_length: Annotated[Size | None, Given("corpus.CorpusSpec.lengths")] = None,
        layout: Annotated[str, OneOf(LAYOUTS)] = "packed",
        window: Annotated[int, Between(1, 10**9)] = WINDOW,
    ) -> None:
        """Tries a few groups to find their number of pairs, without planning.

        Args:
            directions: Directions to draw. Defaults to those with rates.
            phases: Rates by direction (shares of pairs, which need not sum to 1), or phases of
                them. Defaults to temperature(T=5).
            batch_rows: Number of rows of a batch.
            source_length: Ids per row, like target_length. Defaults to the corpus's.
            layout: "packed" for several pairs per row, "single" for one.
            window: Number of pairs of a window, in which larger directions are read (`Draws`).

        Raises:
            InputError: A direction has no rate, or phases or rates are impossible.
            SettingError: A length is below the longest training pair.
        """
        check_arguments(Stream, locals())
        phases = listed(phases, cache.sizes())
        self.directions = _directions(cache, directions, phases)
        self.seed, self.batch_rows, self.layout = seed, batch_rows, layout
        self.source_length = source_length or cache.source_length
        self.target_length = target_length or cache.target_length
        self._window, self._extra = window, cache.extra_ids
        self.shape = Shape(batch_rows, self.source_length, self.target_length)
        packed = max(_GROUP_STEPS, -(-_GROUP_ROWS // batch_rows))
        self.group_steps = packed if layout == "packed" else 1
        self._split = SplitReader(cache, self.directions, "train")
        self._means = [cache.mean_pieces(d) for d in self.directions]
        self._check_lengths(cache)
        given = self.directions, self._split.sizes, seed, self.group_steps, window
        self._phases = Phases(phases, *given, self._most_pairs)
        self._cache_fingerprint = cache.fingerprint
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        # A thread may load ahead while the loop reads counts or begins a phase.
        self._lock = threading.RLock()
        self._given, self._planned = -1, 0
        self._thread = ThreadPoolExecutor(1)
        self._ahead: Future[None] | None = None

    def batch(self, step: int, part: tuple[int, int] = (0, 1)) -> Batch:
        """Returns the batch of a step (`batches.lay_out`), or the part (i, n) of host i of n.

        Raises:
            InputError: The rows do not divide over the hosts.
        """
        assert 0 <= part[0] < part[1], part
        with self._lock:
            self._given = max(self._given, step)
            group = self._group(step // self.group_steps)
        place = step % self.group_steps
        if self.batch_rows % part[1]:
            said = f"a batch of {self.batch_rows} rows does not divide over {part[1]} hosts"
            raise InputError(f"{said}; {nearest_valid(self.batch_rows, part[1])}")
        chosen = group.by_step[group.edges[place] : group.edges[place + 1]]
        return lay_out(self._split, group.examples, chosen, group.plan.row_of, self.shape, part)

    def begin(self, step: int, rates: Mapping[str, float]) -> int:
        """Appends a phase with other rates and returns its first step.

        The next step's batch may be loading already, so the phase starts at the first group after
        it: always at the same step, whatever the loading thread has done by then.

        Raises:
            InputError: A direction is not in this stream, or rates are impossible.
        """
        if unknown := [name for name in rates if name not in self.directions]:
            raise InputError(f"rates for {', '.join(unknown)}: not in this stream")
        with self._lock:
            start = self._phases.begin(max(step, self._given) + 1, rates)
            for number in [n for n in self._groups if n * self.group_steps >= start]:
                del self._groups[number]  # it was only looked at; no batch was returned
        return start

    def pairs(self, step: int) -> tuple[list[StepPair], Batch]:
        """Returns the pairs of a step's batch, and the batch unpacked, with one pair per row."""
        number, place = divmod(step, self.group_steps)
        with self._lock:
            group, stretch = self._group(number), self._phases.of(number)
            first = stretch.first_draw(number)
            drawn = stretch.draws.draw(first, first + stretch.pairs)
        chosen = group.by_step[group.edges[place] : group.edges[place + 1]]
        columns = drawn.directions, drawn.examples, group.plan.row_of
        found = [
            StepPair(self.directions[direction], index, row)
            for direction, index, row in zip(*(of[chosen].tolist() for of in columns), strict=True)
        ]
        rows, alone = np.arange(len(chosen)), self.shape._replace(rows=len(chosen))
        return found, lay_out(self._split, group.examples.take(chosen), rows, rows, alone)

    def later_phases(self) -> list[Phase]:
        """Returns the appended phases."""
        return self._phases.entries[self._phases.initial_count :]

    def restart(self) -> None:
        """Removes the appended phases, as if no batch had been returned."""
        with self._lock:
            self._phases.restart()
            self._groups.clear()
            self._given = -1

    def examples_seen(self, step: int) -> dict[str, int]:
        """Returns each direction's number of pairs before `step`; left-out pairs count as seen."""
        number, place = divmod(step, self.group_steps)
        with self._lock:
            stretch = self._phases.of(number)
            counts = stretch.draws.counts(stretch.first_draw(number))
            group = self._group(number) if place else None
        if group is not None:
            inside = group.examples.directions[group.plan.step_of < place]
            more = np.bincount(inside, minlength=len(counts)).tolist()
            counts = [a + b for a, b in zip(counts, more, strict=True)]
        return dict(zip(self.directions, counts, strict=True))

    def epochs(self, step: int) -> dict[str, float]:
        """Returns each direction's number of epochs before `step`."""
        seen = self.examples_seen(step)
        return {d: seen[d] / n for d, n in zip(self.directions, self._split.sizes, strict=True)}

    def fingerprint(self) -> str:
        """Returns the SHA-256 of everything that decides the batches, except appended phases."""
        corpus = self._cache_fingerprint, self.directions, self._split.sizes
        shape = self.layout, self.group_steps, self.shape
        parts = FORMAT, *corpus, self._phases.initial(), self.seed, self._window, shape
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _check_lengths(self, cache: Cache) -> None:
        for pair in dict.fromkeys(self._split.pairs):
            for role, length, extra in (
                ("source", self.source_length, self._extra[0]),
                ("target", self.target_length, self._extra[1]),
            ):
                name, needed = f"{role}_length", max(cache.longest(pair, role).values()) + extra
                if length < needed:
                    allowed = f"at least {needed}, as a training sentence of {pair} needs"
                    raise SettingError(f"Stream.{name}", length, allowed)

    def _most_pairs(self, draws: Draws) -> int:
        """Returns the number of draws of a group: nearly the most that fit in all trials."""
        if self.layout == "single":
            return self.batch_rows
        most = self._capacity(draws)
        least = self.group_steps * self.batch_rows
        for fill in _FILLS:
            pairs = max(int(fill * most), least)
            # Any groups would do, but the blocks at the beginning of a phase are needed anyway.
            trials = (self._plan(draws, n, pairs, _TRIAL_TRIES) for n in range(_TRIAL_GROUPS))
            if not any(trial.plan.left for trial in trials):
                break
        return max(int(_SPARE * pairs), least)

    def _capacity(self, draws: Draws) -> float:
        """Returns the approximate number of pairs that would fill a group completely."""
        shares = np.diff(np.array(draws.bounds, np.float64))
        shares /= shares.sum()
        source, target = shares @ np.array(self._means) + self._extra
        rows = self.group_steps * self.batch_rows
        return rows * min(self.source_length / source, self.target_length / target)

    def _group(self, number: int) -> _Group:
        """Returns a group, planned now or cached from the last two; the caller has the lock."""
        if number not in self._groups:
            stretch = self._phases.of(number)
            place = number - stretch.first_group
            self._groups[number] = self._plan(stretch.draws, place, stretch.pairs)
            self._planned += 1
            self._fetch_ahead(number, stretch)
            if self._planned % _RELEASE_GROUPS == 0:
                self._split.release()
            while len(self._groups) > 2:
                self._groups.popitem(last=False)
        return self._groups[number]

    def _fetch_ahead(self, number: int, stretch: Stretch) -> None:
        """Lets another thread fetch shards for the next groups if the corpus is in a bucket."""
        if self._split.bounded is None:
            return
        if self._ahead is not None and self._ahead.done():
            self._ahead.result()  # raises that thread's error
        first = number + 1 - stretch.first_group

        def fetch() -> None:
            for later in range(first, first + _AHEAD_GROUPS):
                start = later * stretch.pairs
                self._split.fetch(*stretch.draws.draw(start, start + stretch.pairs))

        self._ahead = self._thread.submit(fetch)

    def _plan(self, draws: Draws, number: int, pairs: int, tries: int = TRIES) -> _Group:
        """Plans the number-th group of a phase, with this number of pairs per group."""
        drawn = draws.draw(number * pairs, (number + 1) * pairs)
        self._split.fetch(*drawn)
        examples = self._split.examples(*drawn)
        lengths = examples.source_lengths, examples.target_lengths
        if self.layout == "packed":
            steps, shape = self.group_steps, self.shape
            made = plan(*lengths, drawn.directions, drawn.epochs, steps, shape, tries)
        else:
            made = BatchPlan(np.zeros(pairs, np.int64), np.arange(pairs))
        placed = np.flatnonzero(made.row_of >= 0)
        step_of = made.step_of[placed].astype(np.uint16)  # numpy sorts these in linear time
        by_step = np.argsort(step_of, kind="stable")
        edges = np.searchsorted(step_of, np.arange(self.group_steps + 1), sorter=by_step)
        return _Group(examples, made, placed[by_step], edges)


class StepPair(NamedTuple):
    """A pair of a batch: `index` is its row in the split of its languages, `row` its batch row."""

    direction: str
    index: int
    row: int


class _Group(NamedTuple):
    """Consecutive steps: the pairs of step i are by_step[edges[i] : edges[i + 1]]."""

    examples: Examples
    plan: BatchPlan
    by_step: Ints
    edges: Ints


def _directions(
    cache: Cache, directions: Sequence[str] | None, phases: Sequence[Phase]
) -> list[str]:
    """Returns the chosen directions, or all with a rate, in the order of the corpus."""
    rated: dict[str, None] = {}
    for phase in phases:
        rated |= dict.fromkeys(name for name, rate in phase.rates.items() if rate)
    if directions is None:
        known = [name for name in cache.directions if name in rated]
        return known + [name for name in rated if name not in known]
    if missing := [name for name in directions if name not in rated]:
        there = f"there are rates for {', '.join(rated)}"
        raise InputError(f"no rate for {', '.join(missing)}; {there}")
    return list(directions)
