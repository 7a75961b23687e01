"""`m4 data remove`: removes a corpus, if no given run uses it."""

import argparse
from pathlib import Path

from m4.jobs.data.list import corpora
from m4.settings import InputError, pasted
from m4.storage.files import remove

EXAMPLE = "m4 data remove runs/demo/data/d3c1eb69... --runs runs/*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", nargs="+", type=Path, help="folders that `m4 data list` names")
    text = "run folders whose corpora must stay"
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help=text)


def run(arguments: argparse.Namespace) -> None:
    """Removes corpora; a job that needs one builds it again."""
    for folder in arguments.corpus:
        known = {one.folder: users for one, users in corpora([folder.parent], arguments.runs)}
        if folder not in known:
            raise InputError(
                f"{folder}: not a corpus, as `{pasted('data', 'list', folder.parent)}` names them"
            )
        if users := known[folder]:
            raise InputError(f"{folder}: {', '.join(users)} was trained with it")
    for folder in arguments.corpus:
        remove(folder)
        print(f"removed {folder}")
