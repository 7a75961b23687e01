"""The processes that a test has started, however many steps down."""

import os
from pathlib import Path


def descendants(mark: Path) -> list[int]:
    """Returns the processes that run and were started with M4_TEST=`mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if b"M4_TEST=" + os.fsencode(mark) in environment:
            found.append(int(path.parent.name))
    return found
