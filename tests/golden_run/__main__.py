"""Compares this machine's numbers with golden.json, or records them there."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.golden_run import golden
from tests.golden_run.cases import CASES, FULL, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.golden_run", description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of runs (default: all)", metavar="CASE")
    parser.add_argument("--record", action="store_true", help="write golden.json")
    parser.add_argument("--full", action="store_true", help="also the runs of real sizes")
    given = parser.parse_args()
    names = given.cases or [*CASES, *(FULL if given.full else ())]
    with tempfile.TemporaryDirectory() as folder:
        found = run(names, Path(folder))
    if given.record:
        golden.record(found)
    differ, unknown = golden.compare(found)
    print(*(unknown + differ or ["All numbers are those of golden.json."]), sep="\n")
    sys.exit(bool(differ))
