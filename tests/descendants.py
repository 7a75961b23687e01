"""The processes that a test has started, however many steps down."""

import os
from pathlib import Path


def descendants(mark: Path) -> list[int]:
    """Those that run and have M4_TEST=`mark` in the environment that they were started with."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if b"M4_TEST=" + os.fsencode(mark) in environment:
            found.append(int(path.parent.name))
    return found
