"""How fast text becomes ids: the part `tokenize` of benchmarks/data.py."""

import time
from statistics import median
from typing import Any

from m4.data.cache.cache import Cache
from m4.data.cache.tokens import arrays_of
from m4.data.vocabulary.chunks import Array, Chunk, ChunkTokenizer, chunks_of
from m4.data.vocabulary.vocabulary import Vocabulary


def tokenize(folder: str, repeats: int) -> dict[str, Any]:
    """Tokens a CPU second, medians; of the training text's two sides, and of each by itself.

    new: every megabyte for the first time, with the words of those before it. known: the same
    megabyte at once again. sentencepiece: its sentences by SentencePiece, which are decoded and in
    a list already.
    """
    cache = Cache(folder)
    arrays = arrays_of(cache.folder, cache.manifest["identity"])
    files = [cache.text_file(code, "train") for code in cache.languages()]
    chunks = [chunk for path in files for chunk in chunks_of(path, train=True)]
    ChunkTokenizer(arrays, 1, None)(chunks[-1])  # loads what is compiled
    found: dict[str, Any] = {"languages": len(files), "pieces": cache.source_vocabulary.size}
    for name, of in (("both", arrays), *((array.name, [array]) for array in arrays)):
        runs = [_run(cache.source_vocabulary, of, chunks) for _ in range(repeats)]
        found[name] = {key: round(median(run[key] for run in runs)) for key in runs[0]}
    return found


def _run(vocabulary: Vocabulary, arrays: list[Array], chunks: list[Chunk]) -> dict[str, float]:
    tokenizer, tokens = ChunkTokenizer(arrays, 1, None), 0
    spent = dict.fromkeys(("new", "known", "sentencepiece"), 0.0)
    for chunk in chunks:
        for label in ("new", "known"):
            began = time.process_time()
            made = tokenizer(chunk)
            spent[label] += time.process_time() - began
        tokens += sum(len(ways[0].ids) for ways in made.arrays.values())
        pairs = [line.split("\t") for line in made.text.decode().split("\n")[:-1]]
        for array in arrays:
            texts = [pair[array.side == "foreign"] for pair in pairs]
            began = time.process_time()
            ids = vocabulary.encode(texts)
            spent["sentencepiece"] += time.process_time() - began
            assert sum(map(len, ids)) == len(made.arrays[array.name][0].ids), chunk
    return {"tokens": tokens} | {label: tokens / seconds for label, seconds in spent.items()}
