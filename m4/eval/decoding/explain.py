"""One sentence inside a model: its pieces, the experts that they chose, and attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from m4.data.cache.tokens import ROLES
from m4.data.preprocess import tag
from m4.eval.decoding.decode import Batch, translations
from m4.eval.decoding.routing_counter import forced
from m4.eval.decoding.search import run_model, unstacked
from m4.eval.decoding.translate import Translator, check_language
from m4.model.attention import Attention
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.settings import InputError
from m4.train.step import apply_model


class Explanation(NamedTuple):
    """A sentence and its translation inside a model.

    In the decoder, position t writes piece t of the translation and reads the piece before it.
    """

    text: str  # the translation
    source: list[str]  # N pieces of the source, with tag and EOS
    target: list[str]  # T pieces of the translation, with EOS
    # MoE layer ("encoder_1") -> experts of each token, {expert: weight}, the first choice first.
    experts: dict[str, list[dict[int, float]]]
    # Attention layer -> weights [heads, queries, keys]: "encoder_0/attention" [heads, N, N],
    # "decoder_0/self_attention" [heads, T, T], "decoder_0/encoder_decoder_attention" [heads, T, N].
    attention: dict[str, np.ndarray]

    def __str__(self) -> str:
        """Returns a line for each piece with its experts by layer, and the shapes of attention."""
        lines = [self.text]
        for stack, pieces in (("encoder", self.source), ("decoder", self.target)):
            layers = {name: of for name, of in self.experts.items() if name.startswith(stack)}
            for at, piece in enumerate(pieces):
                said = [f"{stack} {piece}"]
                for name, of in layers.items():
                    chosen = ", ".join(f"{e} ({w:.2f})" for e, w in of[at].items()) or "none"
                    said.append(f"{name}: {chosen}")
                lines.append("  ".join(said))
        return "\n".join([*lines, *(f"{name} {a.shape}" for name, a in self.attention.items())])


def explain(translator: Translator, line: str, to: str) -> Explanation:
    """Translates a line, cut to the model's maximum, and inspects one pass over both texts.

    Raises InputError if the line is empty, or the model does not translate into `to`.
    """
    check_language(to, translator.languages)
    if not (text := translator.normalise(line)).strip():
        raise InputError(f"{line!r}: an empty sentence has nothing to explain")
    model, directions = translator.model, translator.directions([to])
    assert isinstance(model, Transformer)
    batches: list[tuple[Batch, np.ndarray]] = []
    alone = replace(translator, decoding=replace(translator.decoding, batch_rows=1))
    (found,) = translations(
        alone, [tag(text, to)], directions=directions,
        on_batch=lambda *batch: batches.append(batch),
    )  # fmt: skip
    (((_, tokens_BL, _), best_BT),), (number,) = batches, directions or [0]
    arrays = forced(tokens_BL, best_BT, np.full(len(best_BT), number, np.int32))
    what, params = "the program that looks at a sentence", translator.params
    looked = run_model(translator.layout, what, _look, model, params, arrays)
    choices, weights = jax.device_get(looked)
    source, target = (ids[0][ids[0] > 0] for ids in (tokens_BL, best_BT))
    length = {"e": len(source), "d": len(target)}  # name of a layer of the encoder or the decoder
    experts = {
        layer: [
            {int(e): float(w) for e, w, slot in zip(*token, strict=True) if slot >= 0}
            for token in zip(*(array_BLK[0, : length[layer[0]]] for array_BLK in of), strict=True)
        ]
        for layer, of in choices.items()
    }
    attention = {}
    for layer, weights_BNQR in weights.items():
        keys = len(target) if layer.endswith("self_attention") else len(source)
        attention[layer] = weights_BNQR[0, :, : length[layer[0]], :keys].astype(np.float32)
    both: Any = translator.vocabulary
    pieces = []
    for role, numbers in zip(ROLES, (source, target), strict=True):
        names = getattr(both, role, both).pieces
        # An untrained model may write ids without a piece, as embeddings have additional rows.
        pieces.append([names[n] if n < len(names) else f"<{n}>" for n in numbers])
    return Explanation(found.texts[0], pieces[0], pieces[1], experts, attention)


def _look(model: Transformer, params: Any, batch: Mapping[str, jax.Array]) -> Any:
    """Returns (MoE layer -> experts, weights and slots [B, L, K], attention -> [B, N, Q, R])."""
    choices: dict[str, tuple[jax.Array, ...]] = {}
    weights: dict[str, jax.Array] = {}

    def keep(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if isinstance(module, MoeLayer) and context.method_name == "_sow":
            routing, tokens = args[0], batch["encoder_input_tokens"]
            if module.path[0].startswith("decoder"):
                tokens = batch["decoder_input_tokens"]
            of = (routing.expert_GSK, routing.weight_GSK, routing.position_GSK)
            choices["/".join(module.path[:-1])] = tuple(x.reshape(*tokens.shape, -1) for x in of)
        if isinstance(module, nn.Dropout) and isinstance(module.parent, Attention):
            weights["/".join(module.path[:-1])] = args[0]
        return call(*args, **kwargs)

    with nn.intercept_methods(keep):
        apply_model(*unstacked(model.clone(remat="none"), params), batch, None)
    return choices, weights
