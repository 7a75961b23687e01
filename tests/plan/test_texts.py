"""Facts of a compiled program with a text, without one, and of one that does not compile."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from m4.parallel.platform.machines import topology
from m4.plan import compile as compiling
from tests.command_line import TINY, Said, m4
from tests.plan.test_hlo import SEARCH
from tests.plan.test_program import planned_experiment

SIZES = {
    "argument_size_in_bytes": 2**30, "output_size_in_bytes": 2**20, "alias_size_in_bytes": 2**20,
    "temp_size_in_bytes": 3 * 2**30, "generated_code_size_in_bytes": 2**20,
}  # fmt: skip


class Searching:
    """A compiled program with the loop of a beam search."""

    def memory_analysis(self) -> Any:
        return SimpleNamespace(**SIZES)

    def as_text(self) -> str:
        return SEARCH


class Unprinted(Searching):
    """A program whose text cannot be printed."""

    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure (hlo.cc:1)\nand a trace")


_TRACED: dict[str, Any] = {}


def compile_to(patch: pytest.MonkeyPatch, kind: type[Searching], job: str) -> None:
    """Makes a job's program, traced once, compile to one of `kind` on any machine."""
    real = compiling.PROGRAMS[job]

    def program(*arguments: Any) -> Any:
        if job not in _TRACED:
            _TRACED[job] = real(*arguments)
        return _TRACED[job]._replace(lowered=SimpleNamespace(compile=kind))

    patch.setattr(compiling, "devices_of", lambda machine: jax.devices())
    patch.setitem(compiling.PROGRAMS, job, program)


def plan(
    folder: Path, patch: pytest.MonkeyPatch, kind: type[Searching], machine: str, job: str = "train"
) -> Said:
    """Runs `m4 plan` with the program compiled to one of `kind`; its files are in the folder."""

    def compiled(config: str, *_: Any) -> dict[str, Any]:
        experiment = planned_experiment(folder / "planned")
        return {"config": config, **compiling.facts(experiment, topology(machine), job, 3)}

    compile_to(patch, kind, job)
    patch.setattr("m4.plan.launch.compiled", compiled)
    words = (f"--gin_file={TINY}", f"--output={folder}", f"--topology={machine}")
    return m4("plan", *words, f"--program={job}")


@pytest.mark.parametrize("machine", ["v3:2x2", "h100:1x8"])
def test_search_is_encoding_and_a_decoding_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    compile_to(monkeypatch, Searching, "decode")
    facts = compiling.facts(planned_experiment(tmp_path), topology(machine), "decode", 3)
    assert facts["unknown_loops"] == 1
    # One all-reduce before the loop and one after it; in it one more, and four of half the size.
    assert facts["collectives"]["all-reduce"]["count"] == 2 + 1 + 4
    if machine.startswith("h100"):
        assert "seconds" not in facts
        return
    # Cycles at 0.94 GHz; an all-reduce of 256 bytes twice over four links of 70 GB/s.
    seconds, once = facts["seconds"], 2 * 256 / 280e9
    assert seconds["encoding"]["compute"] == pytest.approx(20 / 0.94e9)
    assert seconds["encoding"]["communication"] == {"all-reduce": pytest.approx(2 * once)}
    assert seconds["step"]["compute"] == pytest.approx((10 + 4 * 3 + 5) / 0.94e9)
    assert seconds["step"]["total"] == pytest.approx(seconds["step"]["compute"] + 3 * once)


@pytest.mark.parametrize(
    ("job", "operations"),
    [("train", "executed, in the traced program"), ("decode", "executed, by arithmetic")],
)
def test_plan_without_the_text_reports_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, operations: str
) -> None:
    said = plan(tmp_path, monkeypatch, Unprinted, "v3:2x2", job)
    assert said.status == 0, said.err
    # 1 GiB given, 3 of temporaries, 1 MiB of code, of a core of TPU v3.
    assert "fits: 4.00 of 16 GiB a device at most" in said.out
    text = " ".join(said.out.split())
    assert "cannot print its program for this machine" in text
    assert "INTERNAL: RET_CHECK failure (hlo.cc:1)" in text
    assert "and a trace" not in text
    stem = Path(TINY).stem + ".v3-2x2" + (".decode" if job == "decode" else "")
    paths = {suffix: tmp_path / f"{stem}{suffix}" for suffix in (".json", ".md")}
    facts = json.loads(paths[".json"].read_text("utf-8"))
    assert facts["no_text"] == "INTERNAL: RET_CHECK failure (hlo.cc:1)"
    assert facts["memory_bytes"]["temporaries"] == 3 * 2**30
    # No invented collectives or times.
    assert not {"collectives", "seconds", "cycles"} & set(facts)
    page = paths[".md"].read_text("utf-8")
    for name in ("RET_CHECK", operations, "temporaries", "fits: 4.00 of 16 GiB"):
        assert name in page, name
    assert "seconds, a model" not in page
    assert "collectives: " not in page


class Failing(Searching):
    """A program that the compiler fails to compile."""

    def __init__(self) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed (tpu.cc:7)\nand a trace")


@pytest.mark.parametrize(
    ("machine", "compiler"), [("v5e:2x2", "libtpu"), ("h100:1x8", "jax-cuda12-pjrt")]
)
def test_a_compiler_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, compiler: str
) -> None:
    compile_to(monkeypatch, Failing, "train")
    # As the compiling process does it; the line is the last one of its standard error.
    monkeypatch.setattr("m4.parallel.platform.signals.end_with", lambda parent: None)
    facts = tmp_path / "facts.json"
    words = (f"--gin_file={TINY}", f"--model_dir={tmp_path}", f"--topology={machine}")
    said = m4("plan", *words, f"--facts={facts}")
    assert said.mistake.startswith(f"m4 plan: --program=train, --topology={machine}: {compiler} ")
    assert "does not compile it: INTERNAL: Mosaic failed (tpu.cc:7); a fault or" in said.mistake
    assert said.mistake.endswith("another version may compile")
    assert not facts.exists()


class Large(Searching):
    """A program with temporaries beyond any GPU's memory."""

    def memory_analysis(self) -> Any:
        return SimpleNamespace(**{**SIZES, "temp_size_in_bytes": 100 * 2**30})


def test_program_larger_than_the_gpus_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = plan(tmp_path, monkeypatch, Large, "h100:1x8")
    assert said.status == 3
    # 1 GiB given, 1 MiB of code.
    assert "does not fit: 101.00 GiB, most of them temporaries (100.00), exceed" in said.out
    assert "would help: " in said.out
    facts = json.loads((tmp_path / f"{Path(TINY).stem}.h100-1x8.json").read_text("utf-8"))
    assert "memory_bytes" not in facts
