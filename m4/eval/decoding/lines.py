"""Lines of text through a model, however long they are."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from m4.data.preprocess import tag
from m4.data.sentences import Chunks, chunks, joined
from m4.eval.decoding.decode import BatchCounts, Translations, translations

if TYPE_CHECKING:
    from m4.eval.decoding.translate import Translator

UNENDED = "unended "


class Line(NamedTuple):
    """A normalised line and the language to translate it into."""

    source: str
    to: str


def translate_lines(
    translator: "Translator",
    lines: Sequence[Line],
    batches: BatchCounts,
    progress: Callable[[int], None],
    too_long: Callable[[int, str], None],
    prefixes: Sequence[str] | None = None,
) -> list[tuple[Translations, Counter[str]]]:
    """Translates lines; one that is too long in chunks, a blank one not at all.

    Args:
        prefixes: Text that each translation begins with. Defaults to `Decoding.prefix`.
        batches: Counts what is in the batches.
        progress: Called after every batch with the number of lines that are done, about.
        too_long: Called with the index of a line that is too long and what becomes of it.

    Returns:
        The translations of each line, and what was counted of it: lines, blank, split (lines in
        chunks), chunks, cut (sentences that were cut to fit), shortened (chunks that no cut makes
        fit), "unended LIMIT" (translations at this limit).
    """
    each = _chunks(translator, lines, too_long)
    counts = [Counter(lines=1, blank=not found.texts, split=len(found.texts) > 1, cut=found.cut,
                      chunks=len(found.texts)) for found in each]  # fmt: skip
    sources = [(i, text) for i, found in enumerate(each) for text in found.texts]
    begins = prefixes or [translator.normalise(translator.decoding.prefix or "")] * len(lines)
    begins = [begins[i] if k == 0 else "" for i, found in enumerate(each)
              for k, _ in enumerate(found.texts)]  # fmt: skip

    def on_cut(index: int, pieces: int, limit: int) -> None:
        counts[sources[index][0]]["shortened"] += 1
        too_long(sources[index][0], f"{pieces} pieces, cut to {limit}")

    batches.unended = []
    done = iter(
        translations(
            translator.model, translator.params, translator.vocabulary,
            [tag(text, lines[i].to) for i, text in sources], translator.decoding,
            prefixes=begins, directions=_directions(translator, [lines[i].to for i, _ in sources]),
            progress=lambda done, all_sentences, _: progress(len(lines) * done // all_sentences),
            on_cut=on_cut, on_batch=batches, layout=translator.layout, factors=translator.factors,
        )
    )  # fmt: skip
    for index, limit in batches.unended:
        counts[sources[index][0]][f"{UNENDED}{limit}"] += 1
    whole = [together([next(done) for _ in found.texts], line.to)
             for line, found in zip(lines, each, strict=True)]  # fmt: skip
    return list(zip(whole, counts, strict=True))


def _directions(translator: "Translator", targets: Sequence[str]) -> list[int] | None:
    """Returns the direction of each source, or None for a model that does not look at them."""
    by_target = {to: translator.directions(to, 1) for to in set(targets)}
    found = [each for to in targets for each in by_target[to] or ()]
    return found or None


def _chunks(
    translator: "Translator", lines: Sequence[Line], too_long: Callable[[int, str], None]
) -> list[Chunks]:
    """Returns the chunks that are translated of each line."""
    most = translator.decoding.max_source_length

    def pieces(lines: Sequence[Line]) -> list[int]:
        tagged = [tag(line.source, line.to) for line in lines]
        return [len(ids) + 1 for ids in translator.vocabulary.encode_tagged(tagged)]

    found = []
    for i, (line, size) in enumerate(zip(lines, pieces(lines), strict=True)):
        split = Chunks([line.source] if line.source.strip() else [], 0)
        if size > most:
            split = chunks(
                line.source, lambda text, to=line.to: pieces([Line(text, to)])[0] <= most
            )
            more = f", {split.cut} sentences cut to fit" if split.cut else ""
            too_long(i, f"{size} pieces, translated in {len(split.texts)} chunks{more}")
        found.append(split)
    return found


def together(chunks: Sequence[Translations], to: str) -> Translations:
    """Joins the translations of a line's chunks rank by rank; scores become means.

    A chunk without so many translations has its last one again. Without chunks the translation is
    empty.
    """
    if not chunks:
        return Translations([""], [0.0])
    most = max(len(each.texts) for each in chunks)
    ranks = [[min(rank, len(each.texts) - 1) for each in chunks] for rank in range(most)]

    def means(values: Sequence[Sequence[float]]) -> list[float]:
        return [fmean(each[k] for each, k in zip(values, rank, strict=True)) for rank in ranks]

    gains = [each.utilities for each in chunks if each.utilities is not None]
    # Byte fallback can spell a line break; a line must stay one line.
    texts = [
        joined(
            [" ".join(each.texts[k].splitlines()) for each, k in zip(chunks, rank, strict=True)], to
        )
        for rank in ranks
    ]
    return Translations(
        texts, means([each.scores for each in chunks]), means(gains) if gains else None
    )
