"""Counts of how often each language would be seen in training, by the stream's arithmetic."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from m4.data.cache.cache import Cache
from m4.data.directions import key_of, pair_of, split_direction
from m4.data.languages import title_of
from m4.data.stream.mixture import pair_tokens

# Maximum number of languages named in a warning.
_MOST_NAMES = 12


class DrawnPair(NamedTuple):
    """Pairs and tokens of two languages that a whole run draws."""

    pairs: int  # pairs drawn in all directions
    pair_share: float  # their share of the run's pairs
    tokens: int  # tokens drawn in all directions
    token_share: float  # their share of the run's tokens
    epochs: float  # epochs of the most frequent direction
    repeated: int  # pairs seen more than once in that direction
    times: int  # number of times that its most repeated pair is seen


def drawn_of(cache: Cache, seen: Mapping[str, int]) -> dict[str, DrawnPair]:
    """Returns what a run draws of each language pair, by `key_of`.

    Args:
        seen: Number of pairs of each direction (`Stream.examples_seen`). Tokens are pairs times the
            mean length.
    """
    tokens = {d: count * pair_tokens(cache, d) for d, count in seen.items()}
    all_pairs, all_tokens = max(sum(seen.values()), 1), max(sum(tokens.values()), 1)
    result = {}
    for pair in cache.language_pairs():
        mine = {d: count for d, count in seen.items() if pair_of(d) == pair}
        size, most = cache.size(pair, "train"), max(mine.values(), default=0)
        pairs, ids = sum(mine.values()), sum(tokens[d] for d in mine)
        result[key_of(pair)] = DrawnPair(
            pairs,
            pairs / all_pairs,
            round(ids),
            ids / all_tokens,
            most / max(size, 1),
            # Every pair is drawn once before any is drawn twice (`m4.data.stream.draws`).
            min(max(most - size, 0), size),
            math.ceil(most / max(size, 1)),
        )
    return result


def repeated_more_than(drawn: Mapping[str, DrawnPair], most_epochs: float) -> dict[str, float]:
    """Returns pair -> epochs, for those that exceed a bound, the worst first.

    For such bounds, see Muennighoff et al. 2023, "Scaling Data-Constrained Language Models": up to
    4 epochs are nearly as good as new data, and repeating beyond 16 gains almost nothing.
    """
    over = {code: one.epochs for code, one in drawn.items() if one.epochs > most_epochs}
    return {code: over[code] for code in sorted(over, key=lambda code: (-over[code], code))}


def warnings(drawn: Mapping[str, DrawnPair], most_epochs: float) -> list[str]:
    """Returns a line for each problem that a user should look at."""
    lines = []
    if over := repeated_more_than(drawn, most_epochs):
        most = [f"{code} {times(epochs)}" for code, epochs in list(over.items())[:_MOST_NAMES]]
        more = ", ..." if len(over) > _MOST_NAMES else ""
        lines.append(
            f"{len(over)} of {len(drawn)} pairs of languages would be seen more than "
            f"{most_epochs:g} times ({', '.join(most)}{more}): lower the temperature or unimax's "
            "max_epochs, or train for fewer steps"
        )
    if never := [code for code, one in drawn.items() if not one.pairs]:
        lines.append(f"never drawn: {', '.join(never)}")
    return lines


def table(
    cache: Cache, drawn: Mapping[str, DrawnPair], sample_by: str, most_epochs: float
) -> Table:
    """Returns a table for the terminal, the largest first, with shares in the sampler's unit."""
    made = Table(box=SIMPLE_HEAD)
    made.add_column("languages", overflow="ellipsis", no_wrap=True, max_width=24)
    for name in ("pairs", "tokens", "share", "epochs", "repeated", "times"):
        made.add_column(name, justify="right", no_wrap=True)
    pairs = {key_of(pair): cache.size(pair, "train") for pair in cache.language_pairs()}
    # The first direction of each pair; the other one differs only by the tag, unless sources and
    # targets have separate vocabularies.
    unit = {key_of(pair_of(d)): pair_tokens(cache, d) for d in reversed(cache.directions)}
    for code in sorted(pairs, key=lambda code: (-pairs[code], code)):
        one, known = drawn[code], title_of(code)
        made.add_row(
            code if known == code else f"{code} {known}",
            f"{pairs[code]:,}",
            short(round(pairs[code] * unit[code])),
            f"{100 * (one.pair_share if sample_by == 'examples' else one.token_share):.2f}%",
            times(one.epochs),
            f"{one.repeated:,}",
            f"{one.times}",
            style="yellow" if one.epochs > most_epochs else None,
        )
    return made


def matrix(seen: Mapping[str, int]) -> Table:
    """Returns a table of drawn pairs for the terminal: sources as rows, targets as columns."""
    sides = [split_direction(direction) for direction in seen]
    sources, targets = (sorted({*codes}) for codes in zip(*sides, strict=True))
    made = Table("pairs drawn", box=SIMPLE_HEAD)
    for target in targets:
        made.add_column(f"→ {target}", justify="right", no_wrap=True)
    for source in sources:
        cells = (seen.get(f"{source}-{target}") for target in targets)
        made.add_row(source, *("" if count is None else short(count) for count in cells))
    return made


def times(epochs: float) -> str:
    """Formats epochs with three digits: 3.14159 -> '3.14', 314.159 -> '314'."""
    return f"{epochs:,.{0 if epochs >= 99.95 else 1 if epochs >= 9.995 else 2}f}"


def short(number: float) -> str:
    """Shortens a number: 1234567 -> '1.2M', 6000 -> '6k', 250 -> '250'."""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.1f}".removesuffix(".0") + letter
    return str(round(number))
