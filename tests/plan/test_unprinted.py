"""A plan of a program that its compiler cannot print: what is known without the text is told."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from m4.plan import compile as compiling
from m4.plan.machines import topology
from m4.plan.program import decode_program, train_program
from tests.command_line import TINY, m4, own_gin
from tests.plan.test_program import setup_of

SIZES = {
    "argument_size_in_bytes": 2**30,
    "output_size_in_bytes": 2**20,
    "alias_size_in_bytes": 2**20,
    "temp_size_in_bytes": 3 * 2**30,
    "generated_code_size_in_bytes": 2**20,
}


class Unprinted:
    """A compiled program whose text cannot be had."""

    def memory_analysis(self) -> Any:
        return SimpleNamespace(**SIZES)

    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure (hlo.cc:1)\nand a trace")


@pytest.mark.parametrize(
    ("job", "program", "operations"),
    [
        ("train", train_program, "executed, by the traced program"),
        ("decode", decode_program, "executed, by arithmetic"),
    ],
)
def test_what_is_known_without_the_text_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, program: Any, operations: str
) -> None:
    def unprinted(*arguments: Any) -> Any:
        traced = program(*arguments)
        return traced._replace(lowered=SimpleNamespace(compile=Unprinted))

    def compiled(config: str, *_: Any) -> dict[str, Any]:
        with own_gin():
            setup = setup_of(tmp_path / "planned")
            return {"config": config, **compiling.facts(setup, topology("v3:2x2"), job, 3)}

    monkeypatch.setattr(compiling, "devices_of", lambda machine: jax.devices())
    monkeypatch.setitem(compiling.JOBS, job, unprinted)
    monkeypatch.setattr("m4.plan.job.compiled", compiled)
    said = m4("plan", f"--gin_file={TINY}", f"--output={tmp_path}", f"--job={job}")
    assert said.status == 0, said.err
    # 1 GiB given, 3 of temporaries, 1 MiB of code, of a core of TPU v3.
    assert "fits: 4.00 of 16 GiB a device at the most" in said.out
    text = " ".join(said.out.split())
    assert "cannot print the program that it made for this machine" in text
    assert "INTERNAL: RET_CHECK failure (hlo.cc:1)" in text
    assert "and a trace" not in text
    stem = Path(TINY).stem + ".v3-2x2" + (".decode" if job == "decode" else "")
    paths = {suffix: tmp_path / f"{stem}{suffix}" for suffix in (".json", ".md", ".html")}
    facts = json.loads(paths[".json"].read_text("utf-8"))
    assert facts["no_text"] == "INTERNAL: RET_CHECK failure (hlo.cc:1)"
    assert facts["memory_bytes"]["temporaries"] == 3 * 2**30
    # Neither collectives nor a time are made up.
    assert not {"collectives", "step_seconds", "search_seconds", "cycles"} & set(facts)
    for path in (paths[".md"], paths[".html"]):
        page = path.read_text("utf-8")
        for name in ("RET_CHECK", operations, "temporaries", "fits: 4.00 of 16 GiB"):
            assert name in page, name
        assert "in the compiled program" not in page
