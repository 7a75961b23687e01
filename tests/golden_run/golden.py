"""The file of recorded hashes: golden.json."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.golden_run.cases import Recorded, run

FILE = Path(__file__).parent / "golden.json"


def record(found: Recorded) -> None:
    """Writes the hashes of these runs into golden.json; those of other runs and keys stay."""
    known = _read()
    known["batches"].update(found["batches"])
    for key, runs in found["values"].items():
        known["values"].setdefault(key, {}).update(runs)
    text = json.dumps(known, indent=1, sort_keys=True)
    FILE.write_text(text + "\n", encoding="utf-8")


def compare(found: Recorded) -> tuple[list[str], list[str]]:
    """Returns a line for each number that differs, and one for each run that cannot be compared.

    Args:
        found: Hashes of runs on this machine, as `cases.run` returns them.
    """
    known = _read()
    differ, unknown = [], []
    for case, hashes in found["batches"].items():
        differ += _lines(case, known["batches"].get(case, {}), hashes)
    for key, runs in found["values"].items():
        for case, values in runs.items():
            if case in (recorded := known["values"].get(key, {})):
                differ += _lines(case, recorded[case], values)
            else:
                unknown.append(
                    f"{case}: golden.json has no numbers of this machine ({key}), only batches"
                )
    return differ, unknown


def check(names: Sequence[str], folder: Path) -> None:
    """Makes runs in `folder`; fails with the numbers that differ, and skips if none are known."""
    differ, unknown = compare(run(names, folder))
    assert not differ, "\n".join(differ)
    if unknown:
        pytest.skip("; ".join(unknown))


def _lines(case: str, known: dict[str, object], found: dict[str, object]) -> list[str]:
    return [
        f"{case}: {name} is {found.get(name)}, recorded is {known.get(name)}"
        for name in sorted({*known, *found})
        if found.get(name) != known.get(name)
    ]


def _read() -> Recorded:
    if not FILE.is_file():
        return {"batches": {}, "values": {}}
    return json.loads(FILE.read_text(encoding="utf-8"))
