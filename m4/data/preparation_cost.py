"""Says what preparing a corpus on many machines takes, before it starts."""

import functools
import tempfile
import time
import zlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from m4.data.beam import KEY
from m4.data.cleaning import FirstCheck
from m4.data.cleaning.clean import Cleaner, Cleaning, Part, alone
from m4.data.cleaning.ledger import Count
from m4.data.directions import SIDES
from m4.data.sources import Source, shards_of
from m4.data.sources.reading.files import packing
from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.tokenizing import RangeTokenizer, TextRange, TokenArray

_SAMPLED_LANGUAGES, _SAMPLED_PAIRS = 20, 2000


def cost(source: Source, cleaning: Cleaning, pairs: Sequence[str], price: float | None) -> str:
    """Returns what a corpus takes, measured on some pairs of it, which this process cleans.

    Args:
        price: Dollars of a CPU hour.
    """
    files = [shard.path for pair in pairs for shard in shards_of(source, pair, "train")]
    cleaner = Cleaner(cleaning, source, pairs, Path())
    sample: list[str] = []
    read = kinds = 0
    started = time.process_time()
    for pair in pairs[:: 1 + len(pairs) // _SAMPLED_LANGUAGES]:
        part = Part(pair, "train", Count())
        found = [*part.read(islice(source.pairs(pair, "train"), _SAMPLED_PAIRS))]
        sample += [f"{text}\n" for chunk in found for side in SIDES for text in chunk.side(side)]
        for stage, check in cleaner.checks(pair, "train")[0].items():
            if isinstance(check, FirstCheck) and found:
                kinds = max(kinds, len(check.keys(found[0])))
            look = alone(check, functools.partial(iter, found))
            found = [*part.checked(stage, look, iter(found))]
        read += part.count.read
    seconds = time.process_time() - started
    text = "".join(sample).encode()
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder) / "text", Path(folder) / "vocabulary.model"
        path.write_bytes(text)
        vocabulary.train(model, sample, 1000, [])
        tokenizer = RangeTokenizer([TokenArray("first", model, 128)], 1, None)
        started = time.process_time()
        tokenizer(TextRange(path, 0, len(text), True))
        seconds += time.process_time() - started
    packed = len(text) / max(len(zlib.compress(text)), 1)
    size = sum(
        path.stat().length * (packed if packing(path.name) else 1)
        for path in files
        if path is not None
    )
    number = size * read / max(len(text), 1)
    hours = number * seconds / max(read, 1) / 3600
    dollars = "" if price is None else f", {hours * price:,.2f} dollars"
    shuffled = f"{number * kinds * KEY.itemsize / 1e9:,.3f} GB of keys shuffled"
    return (
        f"about {number:,.0f} pairs: {hours:,.3f} CPU hours ({read / max(seconds, 1e-9):,.0f} "
        f"pairs a CPU second, measured on {read:,}), {shuffled}{dollars}"
    )
