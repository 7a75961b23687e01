"""Sentence pairs with English from Tatoeba's exports, as gin_configs/tatoeba_102/ reads them.

    python scripts/tatoeba.py sentences.csv links.csv tatoeba

writes tatoeba/<language>.{train,dev,test}.tsv and prints the languages that have enough test
sentences, the largest first, as the configs' LANGUAGES.
"""

import argparse
import collections
import sys
from collections.abc import Iterator
from pathlib import Path

from m4.data.splits import HashSplit, text_hash
from m4.storage.files import whole

ENGLISH = "eng"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sentences", type=Path, help="sentences.csv: number, language, text")
    parser.add_argument("links", type=Path, help="links.csv: number, number of a translation")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument(
        "--most", type=int, default=18_000, help="most training pairs of each (18000)"
    )
    parser.add_argument("--least", type=int, default=100, help="fewest training pairs (100)")
    parser.add_argument("--least_test", type=int, default=50, help="fewest test pairs (50)")
    parser.add_argument("--test_every", type=int, default=12, help="one in 12 sentences is test")
    parser.add_argument("--dev_every", type=int, default=33, help="one in 33 sentences is dev")
    asked = parser.parse_args()
    if asked.output.exists():
        parser.error(f"{asked.output}: is there; give a new folder")
    pairs = pairs_of(asked.sentences, asked.links)
    split = HashSplit("tatoeba", asked.dev_every, asked.test_every)
    listed = {}
    for language, found in pairs.items():
        sizes = write(asked.output, language, found, split, asked.most, asked.least)
        if sizes["test"] >= asked.least_test:
            listed[language] = sizes["train"]
    names = sorted(listed, key=lambda language: (-listed[language], language))
    print(f"LANGUAGES = {names}")
    return 0


def pairs_of(sentences: Path, links: Path) -> dict[str, list[tuple[str, str]]]:
    """Returns language -> (English, translation).

    The files are larger than memory should be: only translations of English sentences are kept.
    """
    english = {number: text for number, code, text in rows(sentences, 3) if code == ENGLISH}
    wanted: dict[str, list[str]] = collections.defaultdict(list)
    for number, translation in rows(links, 2):
        if number in english and translation not in english:
            wanted[translation].append(number)
    pairs: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for number, code, text in rows(sentences, 3):
        for each in wanted.get(number, ()):
            pairs[code].append((english[each], text))
    return {code: found for code, found in sorted(pairs.items()) if code not in ("\\N", "")}


def rows(path: Path, columns: int) -> Iterator[list[str]]:
    """Yields the lines of an export, split at tabs. Raises SystemExit for other columns."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip("\n").split("\t")
            if len(fields) != columns:
                sys.exit(f"{path} line {number}: {len(fields)} columns, not {columns}")
            yield fields


def write(
    folder: Path,
    language: str,
    pairs: list[tuple[str, str]],
    split: HashSplit,
    most: int,
    least: int,
) -> dict[str, int]:
    """Writes a file per split and returns the number of pairs by split.

    Their order is by hash, so that `most` takes any pairs and not the oldest. A language with fewer
    pairs than `least` gets no file.
    """
    parts: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for pair in sorted({*pairs}, key=lambda pair: (text_hash("\t".join(pair)), pair)):
        parts[split(pair[0])].append("\t".join(pair) + "\n")
    parts["train"] = parts["train"][:most]
    if len(pairs) < least or not all(parts.values()):
        return dict.fromkeys(parts, 0)
    for name, lines in parts.items():
        with whole(folder / f"{language}.{name}.tsv") as unfinished:
            unfinished.write_text("".join(lines), encoding="utf-8")
    return {name: len(lines) for name, lines in parts.items()}


if __name__ == "__main__":
    sys.exit(main())
