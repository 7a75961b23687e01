"""The figure of the sizes and scores of parts."""

import json
from pathlib import Path

import pytest

from m4.settings import InputError
from scripts.draw_extraction import main


def part(folder: Path, experts: int, run: str = "runs/whole") -> Path:
    scores = {"sentences": 5, "nll": [2.0, 2.0 + 1 / experts], "bleu": [20.0, 19.0]}
    about = {
        "run": run,
        "experts": [8, experts],
        "parameters": [9_000_000, 1_000_000 * experts],
        "scores": {"gl-en": scores, f"{run[-1]}-en": scores},
    }
    folder.mkdir()
    record = {"config": {}, "extracted": about}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def test_a_line_a_model(tmp_path: Path) -> None:
    parts = [part(tmp_path / "a", 2), part(tmp_path / "b", 4), part(tmp_path / "c", 3, "runs/by")]
    output = tmp_path / "it.svg"
    main([*map(str, parts), f"--output={output}"])
    first = output.read_bytes()
    assert b"<svg" in first
    main([*map(str, parts), f"--output={output}"])
    assert output.read_bytes() == first
    (parts[0] / "run.json").write_text('{"config": {}}', encoding="utf-8")
    with pytest.raises(InputError, match="m4 extract has not made it"):
        main([*map(str, parts), f"--output={output}"])
