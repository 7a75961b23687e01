"""Translation of sentences: batches by length, with one compiled program per length.

A translation depends on its sentence, the model and the settings, never on other sentences of the
call: its own length decides the padded length and the limit of the translation, beam search keeps
rows apart, and routing in evaluation drops no token.
"""

import contextlib
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import flax.linen as nn
import jax
import numpy as np

from m4.data.cache.tokens import LEAST_FACTOR, SPARE_TOKENS
from m4.data.preprocess import EOS_ID, tag_symbol, target_of, trim
from m4.eval.decoding.beam import NEG_INF
from m4.eval.decoding.search import run_model, search, search_batch
from m4.eval.decoding.settings import DEFAULTS, Decoding
from m4.eval.metrics import Metric, counted
from m4.parallel.mesh import Layout
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError, SettingError

SHORTEST_BUCKET = 16
# Maximum number of batches searched at once on a CPU, one per core
# (docs/performance.md, "Decoding on a CPU").
MOST_AT_ONCE = 2
# A call of one batch is split over the cores, into parts of at least this many hypotheses
# (docs/performance.md, "Next to peers").
FEWEST_HYPOTHESES = 16

# (index of the source, its pieces, maximum of pieces)
OnCut = Callable[[int, int, int], None]
_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


class Pieces(Protocol):
    """Methods of a vocabulary that decoding needs (`m4.data.vocabulary.vocabulary.Vocabulary`)."""

    def encode_tagged(self, texts: Sequence[str]) -> list[list[int]]: ...
    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]: ...


class Batch(NamedTuple):
    """Sources of one bucket: indices in the caller's list, and int32 [B, L] with B >= rows."""

    rows: list[int]
    tokens_BL: np.ndarray
    factor: int = LEAST_FACTOR  # translations have at most factor L + 16 + min_length tokens


OnBatch = Callable[[Batch, np.ndarray], None]


@dataclass(frozen=True)
class TrainedModel:
    """A trained model and how it translates.

    All processes translate the same sources together, and all get the result.
    """

    model: nn.Module  # with T5X's contract (`m4.model.transformer`)
    params: Any
    vocabulary: Pieces
    decoding: Decoding = DEFAULTS
    layout: Layout | None = None  # mesh of the parameters; defaults to one device
    # Target language -> its factor in the limit of tokens, if that is more than 2
    # (`Cache.length_factors`).
    factors: Mapping[str, int] = field(default_factory=dict)


@dataclass
class BatchCounts:
    """Counter of sentences, tokens and batch positions, for `on_batch` of `translations`.

    A batch [B, L] of sources and [B, T] of translations, T for the longest one, has B * (L+T)
    positions, including padding and filler rows.
    """

    sentences: int = 0
    tokens: int = 0  # tokens of translations, with EOS
    real: int = 0  # tokens of sources and translations
    places: int = 0  # positions of the batches
    # Limit of tokens -> number of translations that reached it.
    unended: list[tuple[int, int]] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def __call__(self, batch: Batch, best_BT: np.ndarray) -> None:
        asked = len(batch.rows)
        translated = int(np.count_nonzero(best_BT[:asked]))
        self.sentences += asked
        self.tokens += translated
        self.real += translated + int(np.count_nonzero(batch.tokens_BL[:asked]))
        longest = int(np.count_nonzero(best_BT, axis=1).max())
        self.places += len(best_BT) * (batch.tokens_BL.shape[1] + longest)
        ended = (best_BT[:asked] == EOS_ID).any(axis=1)
        limit = best_BT.shape[1]
        self.unended += [(row, limit) for row, at in zip(batch.rows, ended, strict=True) if not at]

    @property
    def seconds(self) -> float:
        """Seconds since this was made."""
        return max(time.monotonic() - self.start, 1e-9)

    def said(self) -> str:
        """Returns a summary of a job: "2,011 sentences, 34,112 tokens in 61.0 s: ..."."""
        seconds = self.seconds
        return (
            f"{self.sentences:,} sentences, {self.tokens:,} tokens in {seconds:,.1f} s: "
            f"{self.sentences / seconds:,.1f} sentences/s, {self.tokens / seconds:,.0f} tokens/s; "
            f"{self.real / max(self.places, 1):.0%} of the batches are real tokens"
        )


class Translations(NamedTuple):
    """Translations of one source; the first one is the translation."""

    texts: list[str]
    scores: list[float]  # log-probability over length penalty of each (docs/decoding.md)
    # With MBR, each one's mean metric against the others, in percent.
    utilities: list[float] | None = None


def as_json(found: Translations) -> dict[str, Any]:
    """Returns a source's translations as an object for a JSON line."""
    said: dict[str, Any] = {"translations": found.texts, "scores": found.scores}
    return said if found.utilities is None else {**said, "utilities": found.utilities}


def default_buckets(max_source_length: int) -> list[int]:
    """Returns lengths 16, 32, 64, ... and the maximum: few programs, and at most half padding."""
    lengths = [SHORTEST_BUCKET]
    while lengths[-1] < max_source_length:
        lengths.append(2 * lengths[-1])
    return [min(length, max_source_length) for length in lengths]


def target_limit(source_length: int, settings: Decoding, factor: int = LEAST_FACTOR) -> int:
    """Returns the maximum tokens, with EOS, of a translation of a bucket's sentences.

    `factor` is the target language's (`m4.data.cache.tokens`).
    """
    spare = SPARE_TOKENS + settings.min_length
    return min(settings.max_target_length, factor * source_length + spare)


def cut_said(limits: Mapping[int, int], settings: Decoding, factors: Mapping[str, int]) -> str:
    """Returns the message on translations that reached their limit: {limit: translations}."""
    count = sum(limits.values())
    spare = SPARE_TOKENS + settings.min_length
    shown = " to ".join(map(str, sorted({min(limits), max(limits)})))
    what = "translation is cut at its" if count == 1 else "translations are cut at their"
    others = "".join(f", {factor} L + {spare} into {to}" for to, factor in sorted(factors.items()))
    return (
        f"{count:,} {what} limit of {shown} tokens, without an end "
        f"({LEAST_FACTOR} L + {spare} for a source padded to L tokens{others}; at most "
        f"max_target_length = {settings.max_target_length})"
    )


def batches(
    sources: Sequence[Sequence[int]],
    buckets: Sequence[int],
    batch_rows: int,
    factors: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Yields full batches of sources of similar length, longest first, with one shape per bucket.

    The last batch is filled with its last source, as padding rows would search to the length limit.
    All sources of a batch have the same factor.
    """
    by_bucket: dict[tuple[int, int], list[int]] = {}
    for row in sorted(range(len(sources)), key=lambda row: -len(sources[row])):
        bucket = min(length for length in buckets if length >= len(sources[row]))
        factor = LEAST_FACTOR if factors is None else factors[row]
        by_bucket.setdefault((bucket, factor), []).append(row)
    for (bucket, factor), rows in by_bucket.items():
        for start in range(0, len(rows), batch_rows):
            chosen = rows[start : start + batch_rows]
            yield Batch(chosen, padded(sources, chosen, batch_rows, bucket), factor)


def padded(ids: Sequence[Sequence[int]], chosen: Sequence[int], rows: int, width: int) -> Any:
    """Returns the chosen ids as int32 [rows, width]; the last one fills the other rows."""
    found = np.zeros((rows, width), np.int32)
    for b in range(rows):
        one = ids[chosen[min(b, len(chosen) - 1)]]
        found[b, : len(one)] = one
    return found


def batches_at_once(layout: Layout | None = None) -> int:
    """Returns how many batches are searched at once: several on a CPU with several cores.

    A mesh allows no threads: programs of all processes must come in one order, and Ctrl-C must
    reach a process that waits for the others. An accelerator has one queue anyway.
    """
    whole = layout is None and jax.sharding.get_abstract_mesh().empty
    on_cpu = jax.default_backend() == "cpu"
    return min(len(available_cpus()), MOST_AT_ONCE) if whole and on_cpu else 1


def searched(
    found_for: Callable[[_Part], _Result], coming: Iterable[_Part], at_once: int
) -> Generator[tuple[_Part, _Result], None, None]:
    """Yields each batch and its result, in order.

    `at_once` threads search, since JAX runs one thread's programs one after the other; 1 means the
    caller's thread. At most `at_once + 1` batches wait. After an error, or when the generator is
    closed, batches that have not begun are dropped.
    """
    if at_once == 1:
        for batch in coming:
            yield batch, found_for(batch)
        return
    waiting: deque[tuple[_Part, Future[_Result]]] = deque()
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
    trained: TrainedModel,
    prefixes: list[list[int]] | None,
    directions: Sequence[int] | None,
    batch: Batch,
) -> tuple[jax.Array, jax.Array]:
    """Searches a batch; prefixes and directions are given for all sources, or None."""
    tokens_BL, settings = batch.tokens_BL, trained.decoding
    given, limit = {"encoder_input_tokens": tokens_BL}, settings.max_target_length
    if prefixes is None:
        limit = target_limit(tokens_BL.shape[1], settings, batch.factor)
    else:
        # Column 0 is the start token; filler rows repeat the last row's prefix.
        begins = [[0, *each] for each in prefixes]
        given["inputs_BT"] = padded(begins, batch.rows, len(tokens_BL), limit)
    if settings.sampling is not None:
        given["name_B"] = np.array([zlib.crc32(ids[ids > 0].tobytes()) for ids in tokens_BL], "u4")
    if directions is not None:
        given["direction_B"] = direction_B(directions, batch.rows, len(tokens_BL))
    options = (
        limit, settings.beams, settings.alpha, settings.n_best, settings.sampling,
        settings.min_length, settings.no_repeat_ngram,
    )  # fmt: skip
    asked = trained.model, trained.params, given, *options
    if trained.layout is None:
        found = search(*asked, grows=True)
    else:
        found = run_model(trained.layout, "the program that translates", search_batch, *asked)
    return jax.block_until_ready(found)


def directions_for(model: Any, directions: Sequence[int] | None) -> Sequence[int] | None:
    """Returns the directions of sources, or None for a model that ignores them."""
    by_task = getattr(model, "by_task", False)
    if by_task and directions is None:
        raise InputError("this model's experts depend on the direction: it must be given")
    return directions if by_task else None


def direction_B(directions: Sequence[int], rows: Sequence[int], size: int) -> np.ndarray:
    """Returns the directions of a batch's rows; the last one fills the other rows."""
    found = [directions[row] for row in rows]
    return np.array(found + found[-1:] * (size - len(found)), np.int32)


def encoded_sources(
    vocabulary: Pieces, sources: Sequence[str], longest: int, on_cut: OnCut
) -> list[list[int]]:
    """Returns the pieces of each source with EOS, at most `longest`."""
    ids = vocabulary.encode_tagged(sources)
    for index, pieces in enumerate(ids):
        if len(pieces) + 1 > longest:
            on_cut(index, len(pieces) + 1, longest)
    return [trim(pieces, longest) for pieces in ids]


def _encoded_prefixes(
    vocabulary: Pieces, prefixes: Sequence[str] | None, count: int, settings: Decoding
) -> list[list[int]] | None:
    """Returns the pieces of each source's prefix, or None if no source has one."""
    texts = [settings.prefix or ""] * count if prefixes is None else list(prefixes)
    if len(texts) != count:
        raise InputError(f"{len(texts)} prefixes for {count} lines: must be as many")
    if not any(texts):
        return None
    encoded = vocabulary.encode_targets(texts)
    longest = max(range(count), key=lambda row: len(encoded[row]))
    if len(encoded[longest]) >= settings.max_target_length:
        allowed = f"of less than Decoding.max_target_length = {settings.max_target_length} pieces"
        raise SettingError("Decoding.prefix", texts[longest], allowed)
    return encoded


def utilities(
    candidates: Sequence[str], metric: Metric, language: str, source: str = ""
) -> np.ndarray:
    """Returns each candidate's mean metric, in percent, with every candidate as reference: [K].

    It is negated if lower is better (minimum Bayes risk: Kumar and Byrne 2004; Eikema and Aziz
    2020). Equal candidates count as often as they occur.
    """
    count = len(candidates)
    hypotheses = [each for each in candidates for _ in candidates]
    references = list(candidates) * count
    sources = [source.removeprefix(tag_symbol(language)).strip()] * count**2
    statistics = counted(metric, hypotheses, references, language, sources)
    mean_K = statistics.formula(statistics.counts).reshape(count, count).mean(axis=1)
    return -mean_K if statistics.lower_is_better else mean_K


def _ranked(
    trained: TrainedModel, sources: Sequence[str], found: tuple[jax.Array, jax.Array]
) -> tuple[list[Translations], np.ndarray]:
    """Returns the translations of a batch, and the best ids of each row, int32 [B, T]."""
    settings, (sequences_BKT, score_BK) = trained.decoding, map(np.asarray, found)
    results, first = [], [0] * len(sequences_BKT)
    for row, source in enumerate(sources):
        sequences_KT, score_K = sequences_BKT[row], score_BK[row]
        # A slot without a hypothesis is left out.
        kept = [k for k, score in enumerate(score_K) if k == 0 or score > NEG_INF / 2]
        texts = trained.vocabulary.decode(sequences_KT[kept].tolist())
        scores, gains = [float(score_K[k]) for k in kept], None
        if settings.mbr:
            utility_K = utilities(texts, settings.mbr_metric, target_of(source), source)
            order = np.argsort(-utility_K, kind="stable").tolist()
            kept, texts, scores = ([each[k] for k in order] for each in (kept, texts, scores))
            gains = utility_K[order].tolist()
        results.append(Translations(texts, scores, gains))
        first[row] = kept[0]
    return results, sequences_BKT[np.arange(len(first)), first]


def warn_of_cut(index: int, pieces: int, limit: int) -> None:
    """Prints a line on stderr; the default `on_cut`."""
    warn(f"source {index + 1}: {pieces} pieces, cut to {limit}")


def warn(text: str) -> None:
    """Prints a line on stderr, unless that is closed."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def parts_of_a_batch(rows: int, beams: int, layout: Layout | None = None) -> int:
    """Returns how many parts of one batch are searched at once: one per core if large enough."""
    at_once = batches_at_once(layout)
    return at_once if rows * beams >= at_once * FEWEST_HYPOTHESES else 1


def translations(
    trained: TrainedModel,
    sources: Sequence[str],
    *,
    prefixes: Sequence[str] | None = None,
    directions: Sequence[int] | None = None,
    on_cut: OnCut = warn_of_cut,
    on_batch: OnBatch | None = None,
) -> list[Translations]:
    """Translates tagged sources ("<2en> ola mundo"); the result is in their order.

    A batch, also the last one, has `decoding.batch_rows` sentences, rounded up so that they divide
    over a mesh. If all sources are fewer, they are split over the cores.

    Args:
        prefixes: Text that each translation begins with. Defaults to `decoding.prefix`.
        directions: Index of each source's direction in training, for gates by task.
        on_cut: Called for each source that is too long.
        on_batch: Called after every batch with it and its translations, int32 [B, T].

    Raises:
        SettingError: A prefix is too long.
    """
    settings, layout, vocabulary = trained.decoding, trained.layout, trained.vocabulary
    lengths = default_buckets(settings.max_source_length)
    directions = directions_for(trained.model, directions)
    ids = encoded_sources(vocabulary, sources, settings.max_source_length, on_cut)
    forced = _encoded_prefixes(vocabulary, prefixes, len(sources), settings)
    rows = settings.batch_rows if layout is None else layout.rows(settings.batch_rows)
    if len(sources) <= rows:
        rows = -(-rows // parts_of_a_batch(rows, settings.beams, layout))
    results: dict[int, Translations] = {}
    by_row = [trained.factors.get(target_of(source), LEAST_FACTOR) for source in sources]
    done_batches = searched(
        lambda batch: _search_batch(trained, forced, directions, batch),
        batches(ids, lengths, rows, by_row),
        batches_at_once(layout),
    )
    with contextlib.closing(done_batches):
        for batch, found in done_batches:
            texts = [sources[row] for row in batch.rows]
            ranked, best_BT = _ranked(trained, texts, found)
            results.update(zip(batch.rows, ranked, strict=True))
            if on_batch is not None:
                on_batch(batch, best_BT)
    return [results[row] for row in range(len(sources))]
