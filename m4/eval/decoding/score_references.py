"""Log-probabilities of given translations: one forward pass a batch, without a search."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from m4.data.preprocess import EOS_ID
from m4.eval.decoding.decode import (
    SHORTEST_BUCKET,
    OnCut,
    Pieces,
    Progress,
    direction_B,
    directions_for,
    encoded_sources,
    warn_of_cut,
)
from m4.eval.decoding.search import direction_ids, jit_over, run_over, unstacked
from m4.eval.decoding.settings import DEFAULTS, Decoding
from m4.parallel.layout import Layout

TOKENS = "encoder_input_tokens", "decoder_target_tokens"  # of a batch


class Scored(NamedTuple):
    """Probability of a translation."""

    logprob: float  # log-probability of all its tokens, EOS too
    tokens: int
    score: float  # logprob over the length penalty, as the search gives it


def log_probabilities(model: Any, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the log-probabilities of targets with EOS, given the sources, float32 [B].

    `batch` has encoder_input_tokens [B, L] and decoder_target_tokens [B, T], where 0 is padding,
    and for gates by task "direction_B".
    """
    model, params = unstacked(model, params)
    target_BT = batch["decoder_target_tokens"]
    given, (L, T) = batch.get("direction_B"), (batch[name].shape[1] for name in TOKENS)
    logits_BTV: Any = model.apply(
        {"params": params},
        batch["encoder_input_tokens"],
        jnp.pad(target_BT[:, :-1], ((0, 0), (1, 0))),
        target_BT,
        enable_dropout=False,
        **direction_ids(given, L, "encoder"),
        **direction_ids(given, T, "decoder"),
    )
    logp_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
    logp_BT = jnp.take_along_axis(logp_BTV, target_BT[:, :, None], axis=2)[:, :, 0]
    return jnp.where(target_BT > 0, logp_BT, 0.0).sum(axis=1)


def penalty(alpha: float, tokens: int) -> float:
    """Returns `m4.eval.decoding.beam.length_penalty` of a number."""
    return ((5 + tokens) / 6) ** alpha


_on_one_device = jax.jit(log_probabilities, static_argnames="model")


def _jit_over(layout: Layout, model: nn.Module) -> Any:
    return jit_over(layout, functools.partial(log_probabilities, model))


def score_references(
    model: nn.Module,
    params: Any,
    vocabulary: Pieces,
    sources: Sequence[str],
    targets: Sequence[str],
    settings: Decoding = DEFAULTS,
    *,
    directions: Sequence[int] | None = None,
    progress: Progress | None = None,
    layout: Layout | None = None,
) -> list[Scored]:
    """Scores each target, given its tagged source ("<2en> ola mundo"), in their order.

    Sources are cut as for a translation; a target has any length. A text is scored as the
    vocabulary splits it: a search may have spelt the same text with other pieces.

    The other arguments are those of `decode.translations`.
    """
    directions = directions_for(model, directions)
    results: list[Scored | None] = [None] * len(sources)
    done = tokens = 0
    for chosen, arrays in batches(vocabulary, sources, targets, settings, layout):
        counts = np.count_nonzero(arrays[TOKENS[1]], axis=1).tolist()
        if directions is not None:
            arrays["direction_B"] = direction_B(directions, chosen, len(counts))
        if layout is None:
            logp_B = _on_one_device(model, params, arrays)
        else:
            what = "the program that scores translations"
            logp_B = run_over(layout, what, _jit_over, (model,), params, arrays)
        for row, logp, count in zip(chosen, np.asarray(logp_B).tolist(), counts, strict=False):
            results[row] = Scored(logp, count, logp / penalty(settings.alpha, count))
            tokens += count
        done += len(chosen)
        if progress is not None:
            progress(done, len(sources), tokens)
    return [each for each in results if each is not None]


def batches(
    vocabulary: Pieces,
    sources: Sequence[str],
    targets: Sequence[str],
    settings: Decoding,
    layout: Layout | None = None,
    on_cut: OnCut = warn_of_cut,
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields batches of pairs of one padded length each, filled up with the last pair.

    The arguments are those of `score_references`; with a batch come the numbers of its pairs.
    """
    longest = settings.max_source_length
    rows = settings.batch_rows if layout is None else layout.rows(settings.batch_rows)
    source_ids = encoded_sources(vocabulary, sources, longest, on_cut)
    target_ids = [[*pieces, EOS_ID] for pieces in vocabulary.encode_targets(targets)]
    groups: dict[tuple[int, int], list[int]] = {}
    for row in range(len(sources)):
        widths = _padded(len(source_ids[row])), _padded(len(target_ids[row]))
        groups.setdefault((min(widths[0], longest), widths[1]), []).append(row)
    for widths, members in sorted(groups.items(), reverse=True):
        for start in range(0, len(members), rows):
            chosen = members[start : start + rows]
            arrays = [np.zeros((rows, width), np.int32) for width in widths]
            for b in range(rows):
                row = chosen[min(b, len(chosen) - 1)]
                for array_BL, ids in zip(arrays, (source_ids[row], target_ids[row]), strict=True):
                    array_BL[b, : len(ids)] = ids
            yield chosen, dict(zip(TOKENS, arrays, strict=True))


def _padded(length: int) -> int:
    return max(SHORTEST_BUCKET, 1 << (length - 1).bit_length())
