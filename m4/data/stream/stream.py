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
# Minimum rows and steps of a span. Larger spans vary less in load, so they can be filled better,
# but a span is planned at once.
_SPAN_ROWS, _SPAN_STEPS = 2048, 4
# Shares of the rows' room that a plan may use. The rest is lost, as no packing is perfect and the
# pairs of a step fill sources and targets unequally.
_FILLS = [percent / 100 for percent in range(99, 0, -1)]
# Trials are few, so plans get a margin: more tries, and fewer pairs than the trials held.
_TRIAL_SPANS, _TRIAL_TRIES = 4, 2
_SPARE = 0.99
# Spans after which read pages are released: tens of megabytes per span.
_RELEASE_SPANS = 128
# Number of spans whose shards are fetched from a bucket in advance.
_AHEAD_SPANS = 2


class Stream:
    """Batches of training pairs; `batch(step)` is a pure function of the arguments and `step`.

    Steps are planned in spans. A span has a fixed number of draws, so that its first draw is known
    without any other span: nearly the largest number for which all pairs fit in a few trial spans
    at the beginning of a phase. Pairs that do not fit later are left out.

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
        """Tries a few spans to find their number of pairs, without planning.

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
        packed = max(_SPAN_STEPS, -(-_SPAN_ROWS // batch_rows))
        self.span_steps = packed if layout == "packed" else 1
        self._split = SplitReader(cache, self.directions, "train")
        self._means = [cache.mean_pieces(d) for d in self.directions]
        self._check_lengths(cache)
        given = self.directions, self._split.sizes, seed, self.span_steps, window
        self._phases = Phases(phases, *given, self._most_pairs)
        self._cache_fingerprint = cache.fingerprint
        self._spans: OrderedDict[int, _Span] = OrderedDict()
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
            span = self._span(step // self.span_steps)
        place = step % self.span_steps
        if self.batch_rows % part[1]:
            said = f"a batch of {self.batch_rows} rows does not divide over {part[1]} hosts"
            raise InputError(f"{said}; {nearest_valid(self.batch_rows, part[1])}")
        chosen = span.by_step[span.edges[place] : span.edges[place + 1]]
        return lay_out(self._split, span.examples, chosen, span.plan.row_of, self.shape, part)

    def begin(self, step: int, rates: Mapping[str, float]) -> int:
        """Appends a phase with other rates and returns its first step.

        The next step's batch may be loading already, so the phase starts at the first span after
        it: always at the same step, whatever the loading thread has done by then.

        Raises:
            InputError: A direction is not in this stream, or rates are impossible.
        """
        if unknown := [name for name in rates if name not in self.directions]:
            raise InputError(f"rates for {', '.join(unknown)}: not in this stream")
        with self._lock:
            start = self._phases.begin(max(step, self._given) + 1, rates)
            for number in [n for n in self._spans if n * self.span_steps >= start]:
                del self._spans[number]  # it was only looked at; no batch was returned
        return start

    def pairs(self, step: int) -> tuple[list[StepPair], Batch]:
        """Returns the pairs of a step's batch, and the batch unpacked, with one pair per row."""
        number, place = divmod(step, self.span_steps)
        with self._lock:
            span, stretch = self._span(number), self._phases.of(number)
            first = stretch.first_draw(number)
            drawn = stretch.draws.draw(first, first + stretch.pairs)
        chosen = span.by_step[span.edges[place] : span.edges[place + 1]]
        columns = drawn.directions, drawn.examples, span.plan.row_of
        found = [
            StepPair(self.directions[direction], index, row)
            for direction, index, row in zip(*(of[chosen].tolist() for of in columns), strict=True)
        ]
        rows, alone = np.arange(len(chosen)), self.shape._replace(rows=len(chosen))
        return found, lay_out(self._split, span.examples.take(chosen), rows, rows, alone)

    def later_phases(self) -> list[Phase]:
        """Returns the appended phases."""
        return self._phases.entries[self._phases.initial_count :]

    def restart(self) -> None:
        """Removes the appended phases, as if no batch had been returned."""
        with self._lock:
            self._phases.restart()
            self._spans.clear()
            self._given = -1

    def examples_seen(self, step: int) -> dict[str, int]:
        """Returns each direction's number of pairs before `step`; left-out pairs count as seen."""
        number, place = divmod(step, self.span_steps)
        with self._lock:
            stretch = self._phases.of(number)
            counts = stretch.draws.counts(stretch.first_draw(number))
            span = self._span(number) if place else None
        if span is not None:
            inside = span.examples.directions[span.plan.step_of < place]
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
        shape = self.layout, self.span_steps, self.shape
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
        """Returns the number of draws of a span: nearly the most that fit in all trials."""
        if self.layout == "single":
            return self.batch_rows
        most = self._capacity(draws)
        least = self.span_steps * self.batch_rows
        for fill in _FILLS:
            pairs = max(int(fill * most), least)
            # Any spans would do, but the blocks at the beginning of a phase are needed anyway.
            trials = (self._plan(draws, n, pairs, _TRIAL_TRIES) for n in range(_TRIAL_SPANS))
            if not any(trial.plan.left for trial in trials):
                break
        return max(int(_SPARE * pairs), least)

    def _capacity(self, draws: Draws) -> float:
        """Returns the approximate number of pairs that would fill a span completely."""
        shares = np.diff(np.array(draws.bounds, np.float64))
        shares /= shares.sum()
        source, target = shares @ np.array(self._means) + self._extra
        rows = self.span_steps * self.batch_rows
        return rows * min(self.source_length / source, self.target_length / target)

    def _span(self, number: int) -> _Span:
        """Returns a span, planned now or cached from the last two; the caller has the lock."""
        if number not in self._spans:
            stretch = self._phases.of(number)
            place = number - stretch.first_span
            self._spans[number] = self._plan(stretch.draws, place, stretch.pairs)
            self._planned += 1
            self._fetch_ahead(number, stretch)
            if self._planned % _RELEASE_SPANS == 0:
                self._split.release()
            while len(self._spans) > 2:
                self._spans.popitem(last=False)
        return self._spans[number]

    def _fetch_ahead(self, number: int, stretch: Stretch) -> None:
        """Lets another thread fetch shards for the next spans if the corpus is in a bucket."""
        if self._split.bounded is None:
            return
        if self._ahead is not None and self._ahead.done():
            self._ahead.result()  # raises that thread's error
        first = number + 1 - stretch.first_span

        def fetch() -> None:
            for later in range(first, first + _AHEAD_SPANS):
                start = later * stretch.pairs
                self._split.fetch(*stretch.draws.draw(start, start + stretch.pairs))

        self._ahead = self._thread.submit(fetch)

    def _plan(self, draws: Draws, number: int, pairs: int, tries: int = TRIES) -> _Span:
        """Plans the number-th span of a phase, with this number of pairs per span."""
        drawn = draws.draw(number * pairs, (number + 1) * pairs)
        self._split.fetch(*drawn)
        examples = self._split.examples(*drawn)
        lengths = examples.source_lengths, examples.target_lengths
        if self.layout == "packed":
            steps, shape = self.span_steps, self.shape
            made = plan(*lengths, drawn.directions, drawn.epochs, steps, shape, tries)
        else:
            made = BatchPlan(np.zeros(pairs, np.int64), np.arange(pairs))
        placed = np.flatnonzero(made.row_of >= 0)
        step_of = made.step_of[placed].astype(np.uint16)  # numpy sorts these in linear time
        by_step = np.argsort(step_of, kind="stable")
        edges = np.searchsorted(step_of, np.arange(self.span_steps + 1), sorter=by_step)
        return _Span(examples, made, placed[by_step], edges)


class StepPair(NamedTuple):
    """A pair of a batch: `index` is its row in the split of its languages, `row` its batch row."""

    direction: str
    index: int
    row: int


class _Span(NamedTuple):
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
