"""Sentences in, translations out: batches by length, one compiled program a length.

A translation depends on its sentence, the model and the settings, never on the other sentences of
the call: a sentence's padded length and the limit of its translation follow from its own length,
beam search keeps rows apart, and routing in evaluation drops no token.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TextIO

import flax.linen as nn
import jax
import numpy as np

from m4.data.preprocess import trim
from m4.eval.decoding.search import search, search_over
from m4.eval.decoding.settings import DEFAULTS, Decoding
from m4.parallel.layout import Layout
from m4.parallel.platform.cpus import available_cpus
from m4.settings import SettingError

SHORTEST_BUCKET = 16
# On a CPU as many batches are searched at once as there are cores, up to this many
# (docs/performance.md, "Decoding on a CPU").
MOST_AT_ONCE = 2

# (sentences done, sentences in all, target tokens so far)
Progress = Callable[[int, int, int], None]
# (index of the source, its pieces, the most that are taken)
OnCut = Callable[[int, int, int], None]
# As `m4.eval.decoding.search.search` returns it.
_Found = tuple[jax.Array, jax.Array]


class Pieces(Protocol):
    """What decoding needs of a vocabulary: `m4.data.vocabulary.vocabulary.Vocabulary` has it."""

    def encode_tagged(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]: ...


class Batch(NamedTuple):
    """Sources of one bucket: their indices in the caller's list, and int32 [B, L], B >= rows."""

    rows: list[int]
    tokens_BL: np.ndarray


OnBatch = Callable[[Batch, np.ndarray], None]


def default_buckets(max_source_length: int) -> list[int]:
    """16, 32, 64, ... and the maximum itself: few programs to compile, at most half padding."""
    lengths = [SHORTEST_BUCKET]
    while lengths[-1] < max_source_length:
        lengths.append(2 * lengths[-1])
    return [min(length, max_source_length) for length in lengths]


def target_limit(source_length: int, max_target_length: int) -> int:
    """The most tokens (with EOS) that a translation of a bucket's sentences may have."""
    return min(max_target_length, 2 * source_length + 16)


def batches(
    sources: Sequence[Sequence[int]], buckets: Sequence[int], batch_rows: int
) -> Iterator[Batch]:
    """Full batches of sources of similar length, longest first; all of a bucket have one shape.

    A last batch is filled up with its last source: padding rows would search to the length limit.
    """
    by_bucket: dict[int, list[int]] = {}
    for row in sorted(range(len(sources)), key=lambda row: -len(sources[row])):
        bucket = min(length for length in buckets if length >= len(sources[row]))
        by_bucket.setdefault(bucket, []).append(row)
    for bucket, rows in by_bucket.items():
        for start in range(0, len(rows), batch_rows):
            chosen = rows[start : start + batch_rows]
            tokens_BL = np.zeros((batch_rows, bucket), np.int32)
            for b in range(batch_rows):
                ids = sources[chosen[min(b, len(chosen) - 1)]]
                tokens_BL[b, : len(ids)] = ids
            yield Batch(chosen, tokens_BL)


def _at_once(layout: Layout | None) -> int:
    """How many batches are searched at once: several where one device is a CPU of many cores.

    No threads over a mesh, the caller's too: programs of the processes must come in one order, and
    Ctrl-C must reach a process that waits for the others. An accelerator has one queue anyway.
    """
    whole = layout is None and jax.sharding.get_abstract_mesh().empty
    on_cpu = jax.default_backend() == "cpu"
    return min(len(available_cpus()), MOST_AT_ONCE) if whole and on_cpu else 1


def _searched(
    found_for: Callable[[Batch], _Found], coming: Iterable[Batch], at_once: int
) -> Generator[tuple[Batch, _Found], None, None]:
    """Each batch and what was found for it, in order; `at_once` threads search, 1: the caller's.

    A batch's operations are too small for several cores, and JAX runs one thread's programs one
    after the other. At most `at_once + 1` batches wait; after an error, or when this is closed,
    those that have not begun are not searched.
    """
    if at_once == 1:
        for batch in coming:
            yield batch, found_for(batch)
        return
    waiting: deque[tuple[Batch, Future[_Found]]] = deque()
    pool = ThreadPoolExecutor(at_once)
    try:
        for batch in coming:
            waiting.append((batch, pool.submit(found_for, batch)))
            if len(waiting) > at_once:
                batch, found = waiting.popleft()
                yield batch, found.result()
        for batch, found in waiting:
            yield batch, found.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _search_batch(
    model: nn.Module, params: Any, settings: Decoding, layout: Layout | None, batch: Batch
) -> _Found:
    limit = target_limit(batch.tokens_BL.shape[1], settings.max_target_length)
    arguments = (model, params, batch.tokens_BL, limit, settings.beams, settings.alpha)
    found = search(*arguments) if layout is None else search_over(layout, *arguments)
    return jax.block_until_ready(found)


def warn_of_cut(index: int, pieces: int, limit: int) -> None:
    """The default `on_cut`: a line on stderr."""
    warn(f"source {index + 1}: {pieces} pieces, cut to {limit}")


def warn(text: str, stream: TextIO | None = None) -> None:
    """A line on `stream`, default stderr; nowhere where stderr is closed."""
    stream = stream or sys.stderr
    if stream is not None:
        print(text, file=stream, flush=True)


def decode(
    model: nn.Module,
    params: Any,
    vocabulary: Pieces,
    sources: Sequence[str],
    settings: Decoding = DEFAULTS,
    *,
    buckets: Sequence[int] | None = None,
    progress: Progress | None = None,
    on_cut: OnCut = warn_of_cut,
    on_batch: OnBatch | None = None,
    layout: Layout | None = None,
) -> list[str]:
    """Translates tagged sources ("<2en> ola mundo"); the result is in their order.

    Args:
      model, params: a module with T5X's contract (`m4.model.transformer`) and its parameters.
      vocabulary: text <-> ids, without EOS.
      sources: the texts.
      settings: a batch, also the last one, has `settings.batch_rows` sentences.
      buckets: the padded lengths, ascending; default 16, 32, 64, ... max_source_length.
      progress: called after every batch.
      on_batch: called after every batch with it and its translations, int32 [B, T].
      layout: the mesh over which the parameters are sharded; None: one device. With a mesh a batch
        has as many rows as divide over it, `batch_rows` or more. With several processes all of
        them call this with the same sources, and all get the result.

    Raises:
      SettingError: buckets that are no lengths.
    """
    lengths = sorted(default_buckets(settings.max_source_length) if buckets is None else buckets)
    if not lengths or lengths[0] < 1:
        raise SettingError("decode.buckets", list(lengths), "a list of positive lengths")
    longest = min(settings.max_source_length, lengths[-1])
    batch_rows = settings.batch_rows if layout is None else layout.rows(settings.batch_rows)

    ids = vocabulary.encode_tagged(sources)
    for index, pieces in enumerate(ids):
        if len(pieces) + 1 > longest:
            on_cut(index, len(pieces) + 1, longest)
    hypotheses = [""] * len(sources)
    done = tokens = 0
    found_for = functools.partial(_search_batch, model, params, settings, layout)
    coming = batches([trim(pieces, longest) for pieces in ids], lengths, batch_rows)
    with contextlib.closing(_searched(found_for, coming, _at_once(layout))) as searched:
        for batch, (sequences_BT, _) in searched:
            best_BT = np.asarray(sequences_BT)
            asked_BT = best_BT[: len(batch.rows)]  # without the rows that fill up the batch
            for row, text in zip(batch.rows, vocabulary.decode(asked_BT.tolist()), strict=True):
                hypotheses[row] = text
            if on_batch is not None:
                on_batch(batch, best_BT)
            done += len(batch.rows)
            tokens += int(np.count_nonzero(asked_BT))
            if progress is not None:
                progress(done, len(sources), tokens)
    return hypotheses
