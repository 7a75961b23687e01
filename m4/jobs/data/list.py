"""`m4 data list`: the corpora of a folder, and the runs that use them."""

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m4.settings import InputError

EXAMPLE = "m4 data list runs/*/data --runs runs/*"


class Listed(NamedTuple):
    """A corpus in a folder; runs: those of the given runs whose model was trained with it."""

    folder: Path
    languages: int
    pairs: int
    bytes: int
    built: datetime.datetime
    runs: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="+", type=Path, help="folders of corpora, as runs/demo/data"
    )
    parser.add_argument(
        "--runs", nargs="*", type=Path, default=[], help="run folders that may use them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each corpus, columns separated by tabs; returns the exit status."""
    print("corpus", "languages", "pairs", "bytes", "built", "runs", sep="\t")
    for one in corpora(arguments.folder, arguments.runs):
        about = (one.languages, one.pairs, one.bytes, one.built.date(), ", ".join(one.runs))
        print(one.folder, *about, sep="\t")
    return 0


def corpora(folders: Sequence[Path], runs: Sequence[Path]) -> list[Listed]:
    """Returns the corpora in folders."""
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
        for manifest in sorted(folder.glob("*/manifest.json")):
            cache: Any = Cache(manifest.parent)
            names = cache.language_pairs()
            found.append(
                Listed(
                    cache.folder,
                    len(cache.languages()),
                    sum(cache.size(name, "train") for name in names),
                    sum(path.stat().st_size for path in cache.folder.rglob("*") if path.is_file()),
                    datetime.datetime.fromtimestamp(manifest.stat().st_mtime, datetime.UTC),
                    users.get(cache.fingerprint, []),
                )
            )
    return found
