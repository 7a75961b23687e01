"""BLEU (Papineni et al., 2002) as sacreBLEU computes it, tokenized for the target language."""

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics.bleu import BLEU

from m4.data.languages import describe, split_code
from m4.eval.metrics import References, Statistics, each_of, reference_count
from m4.settings import InputError, configurable

DEFAULT_TOKENIZER = "13a"
# ISO 15924 script -> tokenizer. In scripts without spaces, 13a would count whole clauses as words
# (fairseq issue 4689). sacreBLEU can segment the first three; others use characters.
_OF_SCRIPT = {
    "Hans": "zh", "Hant": "zh", "Hani": "zh", "Jpan": "ja-mecab", "Hang": "ko-mecab",
    "Kore": "ko-mecab", "Thai": "char", "Laoo": "char", "Khmr": "char", "Mymr": "char",
    "Tibt": "char", "Lana": "char", "Talu": "char", "Tale": "char", "Java": "char", "Bali": "char",
}  # fmt: skip
# Languages that `describe` may not know, for codes without script (ISO 639-3 and 639-1).
_OF_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "cmn", "yue", "wuu", "lzh", "hak", "gan", "hsn"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya"), "char"),
    **dict.fromkeys(("bo", "bod", "dz", "dzo", "shn", "ksw", "mnw", "kxm", "nod"), "char"),
}


def tokenizer(language: str) -> str:
    """Returns sacreBLEU's name of the tokenizer for a target language, such as 'zh_Hant' or 'yue'.

    A script in the code decides; other subtags do not count.
    """
    base, script = split_code(language)
    if script:
        return _OF_SCRIPT.get(script, DEFAULT_TOKENIZER)
    known = _OF_LANGUAGE.get(base) or _OF_SCRIPT.get(describe(base).script)
    return known or DEFAULT_TOKENIZER


@configurable
def bleu(
    hypotheses: Sequence[str], references: References, language: str, sources: Sequence[str] = ()
) -> Statistics:
    """Returns statistics of corpus BLEU. InputError: its tokenizer needs a package."""
    del sources
    name = tokenizer(language)
    try:
        metric = BLEU(tokenize=name, force=True)
    except RuntimeError as error:
        raise InputError(
            f"BLEU into {language!r} needs sacreBLEU's tokenizer {name!r}: `make setup` installs it"
        ) from error
    return statistics("bleu", metric, hypotheses, each_of(references))


def statistics(
    name: str, metric: BLEU, hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> Statistics:
    """Returns statistics of corpus BLEU in the tokenization of `metric`.

    Counts per sentence are both lengths in tokens, then correct and total n-grams for n = 1..4.
    """
    rows = []
    for hypothesis, several in zip(hypotheses, references, strict=True):
        one = metric.corpus_score([hypothesis], [[reference] for reference in several])
        rows.append([one.sys_len, one.ref_len, *one.counts, *one.totals])
    metric.num_refs = reference_count(references)
    counts = np.array(rows, np.int64).reshape(len(rows), 2 + 2 * metric.max_ngram_order)
    return Statistics(name, counts, _formula, str(metric.get_signature()))


def _formula(sums: np.ndarray) -> np.ndarray:
    """Vectorised BLEU.compute_bleu with its defaults (exponential smoothing, all four orders)."""
    sums = np.asarray(sums, np.float64)
    length, reference = sums[..., 0], sums[..., 1]
    correct, total = np.split(sums[..., 2:], 2, axis=-1)
    # The first order without a match counts as 1/2 of a match, the next one as 1/4, and so on.
    missed = (correct == 0) & (total > 0)
    smoothed = np.where(missed, 0.5 ** np.cumsum(missed, axis=-1), correct)
    # An order without any n-grams has precision 0, and so the score is 0.
    possible = (total > 0).all(axis=-1) & (correct > 0).any(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.mean(np.log(100.0 * smoothed / total), axis=-1))
        brevity = np.where(length < reference, np.exp(1.0 - reference / length), 1.0)
    return np.where(possible, brevity * precision, 0.0)
