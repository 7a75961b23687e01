"""Ten thousand broken lines of nineteen sorts."""

from __future__ import annotations

import random
from pathlib import Path

from tests.chaos.trials import lines


def test_broken_lines_are_named_or_counted_and_leave_no_trace(tmp_path: Path) -> None:
    refused, skipped = lines.among(tmp_path, random.Random(1))
    assert refused.verdict == "named", refused
    assert skipped.verdict == "survived", skipped
    assert skipped.said == "10000 of 10000 counted, 9 reasons"
