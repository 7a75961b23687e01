"""`m4 data list`: the corpora of a folder, and the runs that use them."""

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from m4.settings import InputError

if TYPE_CHECKING:
    from m4.data.cache.cache import Cache

EXAMPLE = "m4 data list runs/*/data --runs runs/*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders of corpora, such as runs/demo/data"
    parser.add_argument("folder", nargs="+", type=Path, help=text)
    text = "run folders that may use the corpora"
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help=text)


def run(arguments: argparse.Namespace) -> None:
    """Prints a line for each corpus, in columns separated by tabs."""
    found = corpora(arguments.folder, arguments.runs)
    print("corpus", "languages", "pairs", "bytes", "built", "runs", sep="\t")
    for cache, users in found:
        pairs = sum(cache.size(name, "train") for name in cache.language_pairs())
        size = sum(path.stat().st_size for path in cache.folder.rglob("*") if path.is_file())
        at = (cache.folder / "manifest.json").stat().st_mtime
        built = datetime.datetime.fromtimestamp(at, datetime.UTC).date()
        print(cache.folder, len(cache.languages()), pairs, size, built, ", ".join(users), sep="\t")


def corpora(folders: Sequence[Path], runs: Sequence[Path]) -> list[tuple["Cache", list[str]]]:
    """Returns the corpora in the folders, each with the runs that were trained on it."""
    from m4.data.cache.cache import Cache
    from m4.storage.run_folder import VOCABULARY

    users: dict[str, list[str]] = {}
    for run in runs:
        if (run / VOCABULARY / "manifest.json").is_file():
            users.setdefault(Cache(run / VOCABULARY).fingerprint, []).append(str(run))
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        found += [Cache(path.parent) for path in sorted(folder.glob("*/manifest.json"))]
    return [(cache, users.get(cache.fingerprint, [])) for cache in found]
