"""Rates of failed translations: off-target, copies, empty ones and loops; and length ratios.

The rates of references, as the system `REFERENCE`, show how often the tests themselves err.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from m4.data.cleaning.chunk import Chunk, code_points
from m4.data.cleaning.language_id import NOT_INSTALLED, Py3langid, identifiers_code
from m4.data.cleaning.script import Script
from m4.data.cleaning.stages import is_empty
from m4.data.directions import languages_of, side_of, split_direction
from m4.data.scripts import WEIGHTS, likely_scripts_of, script_numbers, scripts_of
from m4.eval.scoring.levels import SIDES, ResourceLevels
from m4.eval.scoring.score import Decode, Measured, text_table, untagged
from m4.storage.files import read_jsonl
from m4.storage.records import count, named, number, record, text

REFERENCE = "reference"
# Field of a row -> its name in tables.
RATES = {
    "off_script": "wrong script",
    "off_language": "wrong language",
    "copies": "copies",
    "empty": "empty",
    "loops": "loops",
    "length_ratio": "length ratio",
}
# Raised with every change of the rates, so that those of an earlier run are counted again.
FORMAT = 1
# Identifiers only guess at shorter texts. Letters of other scripts count by their Latin equivalent.
_LEAST_LETTERS = 20
# A loop: maximum characters of the repeated part, minimum repetitions in a row (the last may lack
# its separator), and minimum characters in all.
_LONGEST_UNIT, _TIMES, _DIVIDES, _LEAST_LOOP = 40, 4, 2, 16
# Two languages are confused if this share of one's references is taken for the other.
_CONFUSED = 0.1
NO_IDENTIFIER = f"wrong language: not measured, {NOT_INSTALLED}"


class _Known:
    """An identifier restricted to a run's languages; `codes` has its code for each."""

    def __init__(self, identifier: Py3langid, languages: Iterable[str]) -> None:
        known = identifier.languages()
        codes = {language: identifiers_code(language, known) for language in languages}
        self.codes = {language: code for language, code in codes.items() if code in known}
        identifier.choose_among(set(self.codes.values()))
        self.identify = identifier.identify
        self.identity = [identifier.identity(), sorted(self.codes.items())]


def rates(
    measured: Measured,
    identifier: Py3langid | None,
    before: Iterable[Mapping[str, Any]] = (),
    languages: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Returns the rows of rates.jsonl: each direction's references, then each system.

    Args:
        identifier: Language identifier; without one `off_language` is null.
        before: Rows of an earlier run, reused if texts and identifier are the same.
        languages: Further languages that the identifier may choose.
    """
    kept = {(row["system"], row["direction"], row["of"]): dict(row) for row in before}
    by_direction, known = measured.by_direction(), None
    if identifier is not None:
        known = _Known(identifier, sorted({*languages_of(by_direction), *languages}))
    rows = []
    for direction, systems in by_direction.items():
        first = next(iter(systems.values()))
        references = [row._replace(hypothesis=row.reference) for row in first]
        scripts = _scripts(direction, references)
        for name, decodes in {REFERENCE: references, **systems}.items():
            made_of = _digest(decodes, known)
            head = {"system": name, "direction": direction, "split": measured.split}
            rows.append(
                kept.get((name, direction, made_of))
                or {**head, **_row(decodes, direction, scripts, known), "of": made_of}
            )
    return rows


_ROW = record(
    {
        **dict.fromkeys(("system", "direction", "of"), text),
        **dict.fromkeys(("off_script?", "off_language?", "copies?", "empty?", "loops?"), number),
        "length_ratio?": number,
        "sentences": count,
        "taken_for?": named(number),
    }
)


def read_rates(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of an earlier run, or none without a file."""
    return read_jsonl(path, _ROW) if path.is_file() else []


def _digest(decodes: Sequence[Decode], known: _Known | None) -> str:
    """Returns a digest of everything that decides a row."""
    text = json.dumps([FORMAT, known and known.identity, [list(row) for row in decodes]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _chunk(decodes: Sequence[Decode], direction: str) -> Chunk:
    """Returns a chunk with sources as the first side and translations as the second."""
    sources = [untagged(row.source, direction) for row in decodes]
    return Chunk(np.arange(len(decodes)), sources, [row.hypothesis for row in decodes])


def _scripts(direction: str, references: Sequence[Decode]) -> frozenset[str] | None:
    """Returns the scripts of the target language, or None if unknown."""
    target = split_direction(direction)[1]
    if (scripts := scripts_of(target)) is not None or (likely := likely_scripts_of(target)) is None:
        return scripts
    # Scripts that are only likely are ignored if most references are in others.
    wrong = Script().wrong(_chunk(references, direction), "second", likely).mean()
    return None if wrong > 0.5 else likely


def _row(
    decodes: Sequence[Decode], direction: str, scripts: frozenset[str] | None, known: _Known | None
) -> dict[str, Any]:
    """Returns the rates of one direction: shares of sentences, and the ratio of characters."""
    chunk = _chunk(decodes, direction)
    texts = chunk.second
    empty = np.array([is_empty(text) for text in texts])
    same = chunk.normal_digests("first") == chunk.normal_digests("second")
    wrong = None if scripts is None else Script().wrong(chunk, "second", scripts)
    code = known and known.codes.get(split_direction(direction)[1])
    identified, taken_for = _languages(chunk, code, known)
    wanted = sum(len(row.reference) for row in decodes)
    return {
        "sentences": len(texts),
        "off_script": None if wrong is None else _share(wrong),
        "off_language": round(float(sum(taken_for.values())), 6) if identified else None,
        "copies": _share(same & ~empty),
        "empty": _share(empty),
        "loops": _share(loops(texts)),
        "length_ratio": round(sum(map(len, texts)) / wanted, 6) if wanted else None,
        "identified": identified,
        "code": code,
        "taken_for": taken_for,
    }


def _languages(
    chunk: Chunk, code: str | None, known: _Known | None
) -> tuple[int, dict[str, float]]:
    """Returns the number of identified sentences, and the shares of other languages' codes."""
    if known is None or code is None:
        return 0, {}
    weights = np.concatenate([[0], np.cumsum(WEIGHTS[script_numbers(chunk.code_points("second"))])])
    letters = np.diff(weights[np.cumsum(chunk.lengths("second"))], prepend=0) / 10
    enough = np.flatnonzero(letters >= _LEAST_LETTERS)
    found = Counter(known.identify(chunk.second[row])[0] for row in enough.tolist())
    del found[code]
    return len(enough), {name: round(n / len(enough), 6) for name, n in found.most_common()}


def loops(texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Returns whether each text has a loop: up to 40 characters, four times or more."""
    found = np.zeros(len(texts), bool)
    points = [code_points(text).astype(np.int64) for text in texts]
    # Texts are separated by a number that occurs in none.
    ends = [np.array([-1 - row]) for row in range(len(texts))]
    all_points = np.concatenate([part for pair in zip(points, ends, strict=True) for part in pair])
    rows = np.repeat(np.arange(len(texts)), [len(part) + 1 for part in points])
    for unit in range(1, _LONGEST_UNIT + 1):
        other = np.flatnonzero(all_points[unit:] != all_points[:-unit])
        starts = np.concatenate([[0], other + 1])
        runs = np.append(other, max(len(all_points) - unit, 0)) - starts
        found[rows[starts[runs >= max((_TIMES - 1) * unit - _DIVIDES, _LEAST_LOOP - unit)]]] = True
    return found


def confused(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the languages that the identifier confuses, the worst first.

    Languages with one code come first ('zh = zh_Hant'), then 'gl as pt 12%'.
    """
    pairs: dict[tuple[str, str], float] = {}
    by_code: dict[str, set[str]] = {}
    for row in (row for row in rows if row["system"] == REFERENCE and row["code"]):
        target = split_direction(row["direction"])[1]
        by_code.setdefault(row["code"], set()).add(target)
        for code, share in row["taken_for"].items():
            if share >= _CONFUSED:
                pairs[target, code] = max(share, pairs.get((target, code), 0.0))
    order = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    same = [" = ".join(sorted(languages)) for languages in by_code.values() if len(languages) > 1]
    return [*same, *(f"{language} as {code} {share:.0%}" for (language, code), share in order)]


def summary(
    rows: Sequence[Mapping[str, Any]], levels: ResourceLevels
) -> list[dict[str, str | float | int | None]]:
    """Returns means over the large enough directions, a row per side and system."""
    found = []
    large = [row for row in rows if row["sentences"] >= levels.min_test_sentences]
    for side in SIDES:
        mine = [row for row in large if side_of(row["direction"]) == side]
        for system in dict.fromkeys(row["system"] for row in mine):
            group = [row for row in mine if row["system"] == system]
            found.append({"system": system, "side": side, "directions": len(group)})
            for name in RATES:
                values = [row[name] for row in group if row[name] is not None]
                found[-1][name] = float(np.mean(values)) if values else None
    return found


def table(rows: Sequence[Mapping[str, Any]], levels: ResourceLevels) -> Table:
    """Returns `summary` for a terminal, with the confused languages."""
    caption = Text("\n".join(notes(rows)))  # brackets in names are not markup
    made = text_table("Means of how translations fail, in %", caption, "system", "")
    for name in RATES.values():
        made.add_column(name, justify="right")
    for row in summary(rows, levels):
        made.add_row(str(row["system"]), str(row["side"]), *(shown(n, row[n]) for n in RATES))
    return made


def shown(name: str, value: Any) -> str:
    """Returns a rate in percent, a length ratio unchanged, or '' for an unknown one."""
    if value is None:
        return ""
    return f"{value:.2f}" if name == "length_ratio" else f"{100 * value:.1f}"


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns notes on the reliability of language rates."""
    if not any(row["code"] for row in rows):
        return [NO_IDENTIFIER]
    unknown = sorted({split_direction(row["direction"])[1] for row in rows if row["code"] is None})
    lines = ["wrong language by py3langid; the rows of references are its false alarms"]
    if pairs := confused(rows):
        lines.append(f"confused: {', '.join(pairs)}")
    if unknown:
        lines.append(f"not known to it: {', '.join(unknown)}")
    return lines


def _share(mask: npt.NDArray[np.bool_]) -> float:
    return round(float(np.mean(mask)), 6)
