"""spBLEU (Goyal et al., 2022): BLEU on the pieces of FLORES's SentencePiece models."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import sentencepiece
from sacrebleu.metrics.bleu import BLEU

from m4.eval.metrics import References, Statistics, each_of
from m4.eval.metrics.bleu import statistics
from m4.settings import SettingError, configurable


@configurable
def spbleu(
    hypotheses: Sequence[str],
    references: References,
    language: str,
    sources: Sequence[str] = (),
    *,
    model: str = "",
    tokenizer: str = "flores200",
) -> Statistics:
    """Returns statistics of spBLEU; the language is ignored.

    Args:
        model: File of a SentencePiece model (docs/evaluation.md says where to get FLORES's).
        tokenizer: sacreBLEU's name of the model, for the signature, which also has its SHA-256.
    """
    del language, sources
    pieces, digest = _model(model)

    def cut(text: str) -> str:
        return " ".join(pieces.encode(text.rstrip(), out_type=str))

    several = [[cut(reference) for reference in given] for given in each_of(references)]
    metric = BLEU(tokenize="none", force=True)
    metric.tokenizer_signature = f"{tokenizer}[{digest[:8]}]"
    return statistics("spbleu", metric, [cut(text) for text in hypotheses], several)


@lru_cache(maxsize=4)
def _model(name: str) -> tuple[sentencepiece.SentencePieceProcessor, str]:
    """Returns a model and its SHA-256."""
    try:
        content = Path(name).read_bytes()
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        return model, hashlib.sha256(content).hexdigest()
    except (OSError, RuntimeError) as error:
        allowed = "the file of a SentencePiece model, as FLORES's flores200_sacrebleu_tokenizer_spm"
        raise SettingError("spbleu.model", name, allowed) from error
