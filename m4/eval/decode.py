"""Sentences in, translations out: batches by length, one compiled program a length, result files.

A translation depends on its sentence, the model and the settings, never on the other sentences of
the call: a sentence's padded length and the limit of its translation follow from its own length,
beam search keeps rows apart, and routing in evaluation drops no token.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from m4.core.files import whole, write_jsonl
from m4.data.preprocess import EOS_ID, split_direction, tag, trim
from m4.eval.beam import DecodingState, beam_search
from m4.model.blocks import unstack
from m4.model.moe import sown_choices

SHORTEST_BUCKET = 16

# (sentences done, sentences in all, target tokens so far)
Progress = Callable[[int, int, int], None]
# (index of the source, its pieces, the most that are taken)
OnCut = Callable[[int, int, int], None]
# (indices of sources, MoE layer -> the expert of each choice of their tokens, [rows, L or T, K];
# -1: padding, or a choice without a seat)
OnRouted = Callable[[list[int], Mapping[str, np.ndarray]], None]


class Pieces(Protocol):
    """What decoding needs of a vocabulary: `m4.data.vocabulary.Vocabulary` has it."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]: ...


class Batch(NamedTuple):
    """Sources of one bucket: their indices in the caller's list, and int32 [B, L], B >= rows."""

    rows: list[int]
    tokens_BL: np.ndarray


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


@functools.partial(jax.jit, static_argnames=("model", "target_length", "beams", "alpha", "routes"))
def search(
    model: nn.Module,
    params: Any,
    tokens_BL: jax.Array,
    target_length: int,
    beams: int,
    alpha: float,
    routes: bool = False,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """The best sequence of each source: int32 [B, T], its score [B], and who went where.

    The last, with `routes`: MoE layer -> the expert of each choice, int32 [B, L or T, K], -1 where
    there is none, for the tokens of the source and of the best sequence (model.directions > 0).

    `model` (static, by equality) follows T5X's contract; `params` are an argument, so that models
    of equal shape share the compiled program.
    """
    if getattr(model, "scan_layers", False):
        # One layer after the other: beams are gathered along the first axis of what is cached.
        model, params = model.clone(scan_layers=False), unstack(params)
    variables = {"params": params}
    batch = tokens_BL.shape[0]
    sowing = ["intermediates"] if routes else []
    sown: Any
    encoded_BLM, sown = model.apply(
        variables, tokens_BL, enable_dropout=False, mutable=sowing, method="encode"
    )
    chosen = sown_choices(sown.get("intermediates", {}), "chosen_BLK")
    # The contract's call that allocates the cache. Its leaves start at zero, so shapes are enough.
    full_BT = jax.ShapeDtypeStruct((batch, target_length), jnp.int32)
    _, allocated = jax.eval_shape(
        functools.partial(model.apply, enable_dropout=False, decode=True, mutable=["cache"]),
        variables,
        encoder_input_tokens=tokens_BL,
        decoder_input_tokens=full_BT,
        decoder_target_tokens=full_BT,
    )
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), allocated["cache"])

    def step(
        encoded: jax.Array, tokens: jax.Array, last: jax.Array, cache: Mapping[str, Any]
    ) -> tuple[jax.Array, Mapping[str, Any], dict[str, jax.Array]]:
        changed: Any
        logits, changed = model.apply(
            {**variables, "cache": cache},
            encoded,
            tokens,
            last,
            last,
            enable_dropout=False,
            decode=True,
            max_decode_length=target_length,
            mutable=["cache", *sowing],
            method="decode",
        )
        chosen = sown_choices(changed.get("intermediates", {}), "chosen_BLK")
        return logits[:, -1], changed["cache"], chosen

    # The memory of cross-attention is the same at every step and for every beam: it is computed
    # here, by a step whose other results are not used, and not inside the loop.
    _, stepped, one = step(encoded_BLM, tokens_BL, jnp.zeros((batch, 1), jnp.int32), cache)
    cache = _with_cross(cache, stepped)
    # One row a beam, the beams of a sentence adjacent.
    encoded, tokens = (jnp.repeat(x, beams, axis=0) for x in (encoded_BLM, tokens_BL))

    record = _Record({k: x.shape[-1] for k, x in one.items()}, target_length, batch * beams)

    def tokens_to_logits(state: DecodingState) -> tuple[jax.Array, Mapping[str, Any]]:
        logits, new_cache, one = step(encoded, tokens, state.cur_token, state.cache)
        record.step(state, one)
        return logits, new_cache

    start_BT = jnp.zeros((batch, target_length), jnp.int32)
    sequences_BKT, scores_BK = beam_search(
        start_BT, cache, tokens_to_logits, EOS_ID, num_decodes=beams, alpha=alpha
    )
    best_BT = sequences_BKT[:, -1]
    return best_BT, scores_BK[:, -1], chosen | record.of(best_BT)


class _Record:
    """Which experts every live beam chose at every step of a search; at its end, the best ones'.

    References, so that the search need not know of it: nothing but these small arrays is written.
    A beam is known by a hash of its tokens so far (a polynomial modulo 2^32); beams with the same
    tokens choose the same.
    """

    def __init__(self, choices: Mapping[str, int], length: int, rows: int) -> None:
        """choices: decoder layer -> K; without any, nothing is recorded. rows: B times beams."""
        self._chosen_TRK = {
            layer: jax.new_ref(jnp.zeros((length, rows, count), jnp.int32))
            for layer, count in choices.items()
        }
        self._prefix_TR = jax.new_ref(jnp.zeros((length, rows), jnp.uint32))
        powers = [pow(1_000_003, t, 1 << 32) for t in range(length + 1)]  # the start token's first
        self._powers = jnp.array(powers, jnp.uint32)

    def step(self, state: DecodingState, chosen: Mapping[str, jax.Array]) -> None:
        """What the live beams chose, [rows, 1, K] a layer."""
        if not chosen:
            return
        terms = state.sequences.astype(jnp.uint32) * self._powers[None]
        self._prefix_TR[state.cur_index] = jnp.sum(terms, axis=1, dtype=jnp.uint32)
        for layer, chosen_R1K in chosen.items():
            self._chosen_TRK[layer][state.cur_index] = chosen_R1K[:, 0]

    def of(self, best_BT: jax.Array) -> dict[str, jax.Array]:
        """Decoder layer -> the choices behind each token of the best sequences, [B, T, K]."""
        batch, length = best_BT.shape
        terms_BT = best_BT.astype(jnp.uint32) * self._powers[None, 1:]
        before_BT = jnp.cumsum(terms_BT, axis=1, dtype=jnp.uint32) - terms_BT
        prefix_TBK = self._prefix_TR[...].reshape(length, batch, -1)
        beam_TB = jnp.argmax(prefix_TBK == before_BT.T[:, :, None], axis=2)
        found = {}
        for layer, reference in self._chosen_TRK.items():
            chosen = reference[...].reshape(length, batch, prefix_TBK.shape[2], -1)
            chosen = jnp.take_along_axis(chosen, beam_TB[:, :, None, None], axis=2)[:, :, 0]
            found[layer] = jnp.where(best_BT[:, :, None] > 0, jnp.swapaxes(chosen, 0, 1), -1)
        return found


def _with_cross(cache: Mapping[str, Any], stepped: Mapping[str, Any]) -> dict[str, Any]:
    """`cache` with the cross-attention of `stepped`, marked as filled (`m4.model.attention`)."""
    if "cross_key" in cache:
        return {name: stepped[name] for name in ("cross_key", "cross_value")}
    return {
        name: _with_cross(value, stepped[name]) if isinstance(value, Mapping) else value
        for name, value in cache.items()
    }


def warn_of_cut(index: int, pieces: int, limit: int) -> None:
    """The default `on_cut`: a line on stderr."""
    print(f"source {index + 1}: {pieces} pieces, cut to {limit}", file=sys.stderr)


def check_settings(
    beams: int, alpha: float, max_source_length: int, max_target_length: int, batch_rows: int
) -> None:
    """Raises ValueError where a setting of `decode` is out of range."""
    for name, value in (("beams", beams), ("batch_rows", batch_rows)):
        if value < 1:
            raise ValueError(f"jobs.Decoding.{name} = {value}: must be at least 1")
    if alpha < 0:
        raise ValueError(f"jobs.Decoding.alpha = {alpha}: must not be negative")
    for name, value in (
        ("max_source_length", max_source_length),
        ("max_target_length", max_target_length),
    ):
        if value < 2:
            raise ValueError(
                f"jobs.Decoding.{name} = {value}: must be at least 2 (a piece and EOS)"
            )


def decode(
    model: nn.Module,
    params: Any,
    vocabulary: Pieces,
    sources: Sequence[str],
    *,
    beams: int = 4,
    alpha: float = 0.6,
    max_source_length: int = 256,
    max_target_length: int = 256,
    batch_rows: int = 64,
    buckets: Sequence[int] | None = None,
    progress: Progress | None = None,
    on_cut: OnCut = warn_of_cut,
    on_routed: OnRouted | None = None,
) -> list[str]:
    """Translates tagged sources ("<2en> ola mundo"); the result is in their order.

    Args:
      model, params: a module with T5X's contract (`m4.model.transformer`) and its parameters.
      vocabulary: text <-> ids, without EOS.
      sources: the texts.
      beams: K; 1 is greedy search.
      alpha: exponent of the length penalty.
      max_source_length: pieces of a source with tag and EOS; longer ones are cut and `on_cut` told.
      max_target_length: tokens of a translation with EOS. A bucket of length L has the limit
        min(max_target_length, 2 L + 16).
      batch_rows: sentences a batch, also of the last one.
      buckets: the padded lengths, ascending; default 16, 32, 64, ... max_source_length.
      progress: called after every batch.
      on_routed: called after every batch with the experts of its sources' tokens and of their
        translations', if the model has MoE layers and `directions`.

    Raises:
      ValueError: a setting out of range.
    """
    check_settings(beams, alpha, max_source_length, max_target_length, batch_rows)
    lengths = sorted(default_buckets(max_source_length) if buckets is None else buckets)
    if not lengths or lengths[0] < 1:
        raise ValueError(f"decode.buckets = {list(lengths)}: must be positive lengths")
    longest = min(max_source_length, lengths[-1])

    ids = vocabulary.encode(sources)
    for index, pieces in enumerate(ids):
        if len(pieces) + 1 > longest:
            on_cut(index, len(pieces) + 1, longest)
    hypotheses = [""] * len(sources)
    done = tokens = 0
    for batch in batches([trim(pieces, longest) for pieces in ids], lengths, batch_rows):
        sequences_BT, _, chosen = search(
            model,
            params,
            batch.tokens_BL,
            target_limit(batch.tokens_BL.shape[1], max_target_length),
            beams,
            alpha,
            on_routed is not None,
        )
        best_BT = np.asarray(sequences_BT)[: len(batch.rows)]
        for row, text in zip(batch.rows, vocabulary.decode(best_BT.tolist()), strict=True):
            hypotheses[row] = text
        if on_routed is not None:
            on_routed(batch.rows, {k: np.asarray(x)[: len(best_BT)] for k, x in chosen.items()})
        done += len(batch.rows)
        tokens += int(np.count_nonzero(best_BT))
        if progress is not None:
            progress(done, len(sources), tokens)
    return hypotheses


def hypotheses_path(folder: Path, split: str, direction: str) -> Path:
    """Where the translations of a direction are: FOLDER/<split>.<direction>.jsonl."""
    return Path(folder) / f"{split}.{direction}.jsonl"


def decode_to_files(
    translate: Callable[[list[str]], list[str]],
    folder: Path | str,
    split: str,
    pairs: Mapping[str, Sequence[tuple[str, str]]],
    settings: Mapping[str, Any],
    *,
    sentences_at_once: int = 1024,
    starting: Callable[[list[str]], None] | None = None,
) -> list[str]:
    """Translates the test sets of directions and writes one file each; returns the directions done.

    A file has a line {"source", "reference", "hypothesis"} a sentence, in order, and appears whole
    or not at all. Beside it `<split>.<direction>.json` says what made it; a direction whose file
    was made with the same settings from the same sentences is left as it is.

    Args:
      translate: tagged sources -> hypotheses, e.g. a partial of `decode`.
      folder: MODEL_DIR/decodes.
      split: "test" or "dev".
      pairs: direction ("en-gl") -> (source, reference), source without a tag.
      settings: JSON; all that decides the result: checkpoint step, beams, alpha, lengths,
        fingerprint of the vocabulary.
      sentences_at_once: directions are decoded together up to this many sentences (fuller
        batches); an interrupted run loses at most these.
      starting: told the direction of every source before `translate` is given them.
    """
    folder = Path(folder)
    waiting = [
        direction
        for direction in pairs
        if not _is_done(folder, split, direction, _made_by(pairs[direction], settings))
    ]
    group: list[str] = []
    for position, direction in enumerate(waiting):
        group.append(direction)
        size = sum(len(pairs[each]) for each in group)
        if size < sentences_at_once and position + 1 < len(waiting):
            continue
        if starting is not None:
            starting([each for each in group for _ in pairs[each]])
        hypotheses = iter(
            translate(
                [tag(pair[0], split_direction(each)[1]) for each in group for pair in pairs[each]]
            )
        )
        for each in group:
            _write(folder, split, each, pairs[each], hypotheses, settings)
        group = []
    return waiting


def _made_by(pairs: Sequence[tuple[str, str]], settings: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps([list(pair)[:2] for pair in pairs]).encode()
    made_by = {**settings, "sentences": len(pairs), "sha256": hashlib.sha256(text).hexdigest()}
    return json.loads(json.dumps(made_by))  # as it will be read: tuples become lists


def _is_done(folder: Path, split: str, direction: str, made_by: Mapping[str, Any]) -> bool:
    path = hypotheses_path(folder, split, direction)
    note = path.with_suffix(".json")
    return path.is_file() and note.is_file() and json.loads(note.read_text("utf-8")) == made_by


def _write(
    folder: Path,
    split: str,
    direction: str,
    pairs: Sequence[tuple[str, str]],
    hypotheses: Iterator[str],
    settings: Mapping[str, Any],
) -> None:
    path = hypotheses_path(folder, split, direction)
    note = path.with_suffix(".json")
    note.unlink(missing_ok=True)  # never an old note beside new translations
    write_jsonl(
        path,
        (
            {"source": source, "reference": reference, "hypothesis": next(hypotheses)}
            for source, reference, *_ in pairs
        ),
    )
    with whole(note) as unfinished:
        unfinished.write_text(json.dumps(_made_by(pairs, settings), indent=1) + "\n", "utf-8")
