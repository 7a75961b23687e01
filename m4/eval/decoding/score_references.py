"""Log-probabilities of given translations: one forward pass per batch, without a search."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from m4.data.preprocess import EOS_ID
from m4.eval.decoding import decode
from m4.eval.decoding.decode import TrainedModel
from m4.eval.decoding.search import direction_ids, run_model, unstacked

TOKENS = "encoder_input_tokens", "decoder_target_tokens"  # of a batch


class Scored(NamedTuple):
    """Probability of a translation."""

    logprob: float  # log-probability of all its tokens with EOS
    tokens: int
    score: float  # logprob divided by the length penalty, as in the search


def log_probabilities(model: Any, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the log-probabilities of targets with EOS, given the sources, float32 [B].

    `batch` has encoder_input_tokens [B, L] and decoder_target_tokens [B, T], padded with 0, and
    "direction_B" for gates by task.
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


def score_references(
    trained: TrainedModel,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    directions: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Scored]:
    """Scores each target given its tagged source ("<2en> ola mundo"), in order.

    Sources are cut as in translation; targets may have any length. A text is scored in the pieces
    into which the vocabulary splits it; a search may have spelt it with others.
    """
    layout, settings, model = trained.layout, trained.decoding, trained.model
    directions = decode.directions_for(model, directions)
    results: list[Scored | None] = [None] * len(sources)
    done = 0
    for chosen, arrays in batches(trained, sources, targets):
        counts = np.count_nonzero(arrays[TOKENS[1]], axis=1).tolist()
        if directions is not None:
            arrays["direction_B"] = decode.direction_B(directions, chosen, len(counts))
        what = "the program that scores translations"
        logp_B = run_model(layout, what, log_probabilities, model, trained.params, arrays)
        for row, logp, count in zip(chosen, np.asarray(logp_B).tolist(), counts, strict=False):
            results[row] = Scored(logp, count, logp / ((5 + count) / 6) ** settings.alpha)
        done += len(chosen)
        if progress is not None:
            progress(done)
    return [each for each in results if each is not None]


def batches(
    trained: TrainedModel,
    sources: Sequence[str],
    targets: Sequence[str],
    on_cut: decode.OnCut = decode.warn_of_cut,
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields indices of pairs with their batch, which has one padded length on each side."""
    layout, longest = trained.layout, trained.decoding.max_source_length
    rows = trained.decoding.batch_rows
    rows = rows if layout is None else layout.rows(rows)
    source_ids = decode.encoded_sources(trained.vocabulary, sources, longest, on_cut)
    target_ids = [[*pieces, EOS_ID] for pieces in trained.vocabulary.encode_targets(targets)]
    groups: dict[tuple[int, int], list[int]] = {}
    for row in range(len(sources)):
        widths = _padded(len(source_ids[row])), _padded(len(target_ids[row]))
        groups.setdefault((min(widths[0], longest), widths[1]), []).append(row)
    for widths, members in sorted(groups.items(), reverse=True):
        for start in range(0, len(members), rows):
            chosen = members[start : start + rows]
            each = zip((source_ids, target_ids), widths, strict=True)
            arrays = [decode.padded(ids, chosen, rows, width) for ids, width in each]
            yield chosen, dict(zip(TOKENS, arrays, strict=True))


def _padded(length: int) -> int:
    return max(decode.SHORTEST_BUCKET, 1 << (length - 1).bit_length())
