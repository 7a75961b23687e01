"""A plan's tables and pages."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from m4.plan import launch
from m4.plan.machines import GIB
from m4.plan.report import decoding_tables, tables

FACTS: dict[str, Any] = {
    "format": launch.FORMAT,
    "config": "moe_2048e_36l",
    "program": "train",
    "topology": "v3:32x32",
    "devices": 2048,
    "device_bytes": 16 * GIB,
    "versions": {"jax": "1", "libtpu": "2"},
    "batch": {"rows": 32_768, "source_length": 128, "target_length": 128, "beams": 1},
    "model": {
        "vocab_size": 32_000,
        "source_vocab_size": 64_000,
        "directions": 100,
        "experts": 2048,
        "eval_capacity_factor": None,
        "remat": "full",
        "dtype": "float32",
    },
    "parameters": {"experts": 600_000_000_000, "attention": 19_000_000_000},
    "given_bytes": {"replicated weights": GIB, "expert weights": 2 * GIB, "optimizer state": 0},
    "memory_bytes": {
        "replicated weights": GIB,
        "expert weights": 2 * GIB,
        "optimizer state": 0,
        "batch": 0,
        "temporaries": 6 * GIB,
        "code": 0,
    },
    "collectives": {"all-to-all": {"count": 108, "payload_bytes": GIB, "sent_bytes": GIB / 2}},
    "sent_bytes": {"ici": GIB / 2, "dcn": 0.0},
    "loops_unknown": False,
    "cycles": 752_000_000,
    "uncosted": 0,
    "step_seconds": {"compute": 0.8, "communication": {"all-to-all": 0.2}, "total": 1.0},
    "flops": {"forward": {"dense": 1e12}, "model": 3e12, "executed": 4e12, "traced": 4.1e12},
    "compiler": {
        "trace_seconds": 1.0,
        "compile_seconds": 2.0,
        "compile_cpu_seconds": 2.5,
        "cpu_seconds": 3.0,
        "host_bytes": 4 * GIB,
    },
}
REFUSED = {
    **{key: FACTS[key] for key in ("config", "program", "topology", "devices", "device_bytes")},
    **{key: FACTS[key] for key in ("given_bytes", "batch", "model", "parameters", "compiler")},
    "versions": FACTS["versions"],
    "refused": {
        "message": "Ran out of memory",
        "needed_bytes": 20 * GIB,
        "available_bytes": 15 * GIB,
        "advice": ["a smaller batch"],
    },
}


def test_costs_follow_from_the_time_of_a_step() -> None:
    found = tables.costs(FACTS)
    assert found is not None
    # 32,768 rows of 128 source pieces in a second: 4,194,304; 10^12 of them 238,419 s = 2.76 days;
    # times 2048 cores / 365 days = 15.48 years. 3 * 10^12 of 61.5 * 10^12 operations are 4.9%.
    assert found["source_tokens_per_second"] == 4_194_304
    # As many of the target; metrics.jsonl's tokens_per_second is of both.
    assert found["target_tokens_per_second"] == 4_194_304
    assert found["tokens_per_second"] == 2 * 4_194_304
    assert found["days"] == pytest.approx(2.7595, abs=1e-4)
    assert found["device_years"] == pytest.approx(15.483, abs=1e-3)
    assert found["utilisation"] == pytest.approx(0.0488, abs=1e-4)
    assert tables.costs({**FACTS, "program": "decode"}) is None
    unknown = {**FACTS["step_seconds"], "compute": None, "total": None}
    assert tables.costs({**FACTS, "step_seconds": unknown}) is None


def said(facts: dict[str, Any]) -> str:
    stream = io.StringIO()
    tables.show(facts, Console(file=stream, width=160))
    return stream.getvalue()


def test_time_model_is_compared_with_the_same_model_of_the_paper_only() -> None:
    text = said(FACTS)
    assert "fits: 9.00 of 16 GiB" in text
    assert "A MODEL, not a measurement" in text
    rows = {row[0]: row[1] for part in tables.sections(FACTS) for row in part.rows}
    # 1 / 0.72 steps a second; 1.0 s / 1.389 s = 0.72.
    assert (rows["the paper's step (table 3)"], rows["model / paper"]) == ("1.389", "0.72")
    assert rows["total"] == "619,000,000,000"
    assert "16% of the time of MoE and Transformer layers" in " ".join(text.split())
    # With other devices, another batch or another model there is no comparison.
    batch, parameters = FACTS["batch"], FACTS["parameters"]
    others = [
        {"devices": 1024},
        {"config": "mine"},
        {"label": "bfloat16"},
        {"topology": "v4:8x16x16"},
        {"batch": {**batch, "rows": 32_768 // 4}},
        {"batch": {**batch, "source_length": 64}},
        {"parameters": {**parameters, "experts": 500_000_000_000}},
    ]
    for other in others:
        names = [row[0] for part in tables.sections({**FACTS, **other}) for row in part.rows]
        assert "step" in names
        assert "model / paper" not in names, other


def cells(facts: dict[str, Any]) -> dict[str, str]:
    return {row[0]: row[-1] for part in tables.sections(facts) for row in part.rows}


def test_every_plan_has_the_band_of_the_models_error() -> None:
    for other in ({}, {"config": "mine"}, {"topology": "v6e:16x16"}, {"topology": "h100:256x8"}):
        text = " ".join(said({**FACTS, **other}).split())
        # docs/pod.md's table.
        assert "it gives 1.09 to 1.27 of the step that the paper measured" in text, other
        assert "128 experts 2.04 to 2.27" in text
        assert ("estimate of cycles at the chip's clock" in text) == ("topology" not in other)
        assert ("speed fitted to section 5.2" in text) == ("h100" not in str(other))
    assert "1.09 to 1.27" in " ".join(said(DECODING).split())


@pytest.mark.parametrize(
    ("machine", "name"),
    # Two cores of a chip are one device of v4 and v5p.
    [("v3:32x32", "core"), ("v5e:16x16", "core"), ("v4:4x4x4", "device"), ("h100:16x8", "GPU")],
)
def test_years_are_of_devices_and_tokens_of_named_sides(machine: str, name: str) -> None:
    found = cells({**FACTS, "topology": machine})
    assert [row for row in found if row.endswith("-years")] == [f"{name}-years"]
    assert found["source tokens/s"] == found["target tokens/s"] == "4,194,304"
    assert found["tokens/s (both sides)"] == "8,388,608"
    assert found["all-to-all's share of the step"] == "20%"
    assert "days to 10^12 source tokens" in found


def test_slices_have_what_they_send_by_each_network() -> None:
    sent = {"count": 46, "payload_bytes": GIB / 4, "sent_bytes": GIB / 4}
    facts = {
        **FACTS,
        "topology": "2*v5e:16x16",
        "collectives": {**FACTS["collectives"], "all-reduce between slices": sent},
        "sent_bytes": {"ici": GIB / 2, "dcn": GIB / 4},
    }
    found = cells(facts)
    assert found["all, inside a slice (ICI)"] == "0.500"
    assert found["all, between slices (DCN)"] == found["all-reduce between slices"] == "0.250"
    assert "25 GB/s a host of 8 chips" in " ".join(said(facts).split())
    assert "all, inside a slice (ICI)" not in cells(FACTS)
    assert tables.file_name(facts) == "moe_2048e_36l.2xv5e-16x16"


def test_parameters_are_compared_with_the_same_model_of_the_paper_only() -> None:
    assert "600 billion; +3.2%" in said(FACTS)  # 619 of 600 billion
    # 554 of 600 billion are 7.7% less, 519 of them 13.5%: another model.
    for experts, shown in ((535e9, True), (500e9, False)):
        parameters = {**FACTS["parameters"], "experts": int(experts)}
        assert ("The paper (table 1)" in said({**FACTS, "parameters": parameters})) == shown


def test_compiled_flops_are_compared_with_the_traced_ones() -> None:
    name = "executed, in the compiled program"
    assert name not in said(FACTS)  # its text cannot be printed
    for compiled, why in ((4.1e12, "+0.0%"), (5.125e12, "+25.0%"), (2.05e12, "-50.0%")):
        flops = {**FACTS["flops"], "compiled": compiled, "unread": {}}
        parts = tables.sections({**FACTS, "flops": flops})
        (part,) = [part for part in parts if part.title == "FLOPs"]
        assert {row[0]: row[1] for row in part.rows}[name] == f"{compiled / 1e12:.3f}"
        note = part.notes[-1]
        assert why in note
        assert [reason in note for reason in ("More: ", "Less: ")] == [
            compiled > 5e12,
            compiled < 4e12,
        ]
        assert "not counted and may" not in note
    flops = {**FACTS["flops"], "compiled": 4e12, "unread": {"tpu_custom_call": 1200}}
    (part,) = [p for p in tables.sections({**FACTS, "flops": flops}) if p.title == "FLOPs"]
    assert "1,200 operations of a step are not counted" in part.notes[-1]
    assert part.notes[-1].endswith("products: tpu_custom_call.")
    looped = tables.sections({**FACTS, "flops": flops, "loops_unknown": True})
    assert any("counts once" in note for p in looped if p.title == "FLOPs" for note in p.notes)


def test_program_that_does_not_fit_has_advice() -> None:
    text = said(REFUSED)
    assert "does not fit: Ran out of memory" in text
    assert "would help: a smaller batch" in text
    rows = {row[0]: row[1] for part in tables.sections(REFUSED) for row in part.rows}
    assert rows["needed, by the compiler"] == "20.000"
    # Facts that need no program that fits, and the cost of compiling.
    assert rows["total"] == "619,000,000,000"
    assert rows["seconds to compile"] == "2"
    assert rows["host memory, GiB"] == "4.0"
    # For GPUs m4 adds up: XLA compiles programs whether they fit or not.
    gpus = tables.sections({**REFUSED, "topology": "h100:256x8"})
    names = [row[0] for part in gpus for row in part.rows]
    assert "needed, sum of the above" in names
    assert "needed, by the compiler" not in names


def test_plan_reports_a_program_that_cannot_be_printed() -> None:
    known = {k: v for k, v in FACTS.items() if k not in ("collectives", "step_seconds", "cycles")}
    text = said({**known, "no_text": "INTERNAL: RET_CHECK"})
    assert "cannot print its program" in text
    assert "RET_CHECK" in text
    assert "temporaries" in text


PART = {"forward": {"dense": 1e12}, "model": 2e12, "executed": 3e12, "compiled": 3.5e12}
DECODING: dict[str, Any] = {
    **{key: value for key, value in FACTS.items() if key != "step_seconds"},
    "program": "decode",
    "batch": {"rows": 2048, "source_length": 128, "target_length": 100, "beams": 4},
    "flops": {
        "encoding": {**PART, "unread": {}},
        "step": {**PART, "forward": {"dense": 5e11, "logits": 1e9}, "unread": {"Kernel": 3}},
    },
    "loops_unknown": True,
    "search_loops": 1,
    "uncosted": {"encoding": 0, "step": 7},
    "search_seconds": {
        "encoding": {"compute": 2.0, "communication": {"all-to-all": 1.0}, "total": 3.0},
        "step": {"compute": 0.04, "communication": {"all-reduce": 0.01}, "total": 0.05},
    },
    "price_per_chip_hour": 2.0,
}


def test_decoding_costs_have_all_steps_of_a_batch() -> None:
    found = decoding_tables.costs(DECODING)
    assert found is not None
    # 3 s and a hundred steps of 0.05 s are 8 s for 2,048 sentences, 256 a second; 10^6 of them take
    # 3,906.25 s, with 1,024 chips 1,111.1 hours of a chip.
    assert found["batch_seconds"] == pytest.approx(8.0)
    assert found["sentences_per_second"] == pytest.approx(256.0)
    assert found["chip_hours"] == pytest.approx(1111.11, abs=0.01)
    parts = {part.title: part for part in tables.sections(DECODING)}
    time = parts["Decoding time: a model"]
    rows = {row[0]: row[1] for row in time.rows}
    assert rows["encoding a batch"] == "3.0000"
    assert (rows["a decoding step"], rows["decoding steps, at most"]) == ("0.0500", "100")
    assert rows["a batch of 2,048 sentences, all steps"] == "8.00"
    assert rows["price for 1,000,000 sentences, all steps, at 2 a chip and hour"] == "2,222.22"
    notes = " ".join(time.notes)
    for said_so in (
        "A MODEL, not a measurement",
        "bounds the number of steps",
        "7 operations of a",
    ):
        assert said_so in notes, said_so
    flops = parts["FLOPs"]
    assert ("dense feed-forward layers", "1,000.0", "500.0") in flops.rows
    assert ("executed, in the compiled program", "3,500.0", "3,500.0") in flops.rows
    unread = "3 operations of a decoding step are not counted and may be products: Kernel."
    assert unread in flops.notes
    assert not any("loops of unknown length" in note for note in flops.notes)
    assert any("eval_capacity_factor = None" in note for note in flops.notes)
    for other in ({"experts": 0}, {"eval_capacity_factor": 2.0}):
        few = tables.sections({**DECODING, "model": {**FACTS["model"], **other}})
        assert not any("eval_capacity_factor" in note for part in few for note in part.notes)
    # 3.5 * 10^12 operations are more than 3; 3.1 are within the arithmetic's tolerance.
    assert sum("does more than by arithmetic" in note for note in flops.notes) == 2
    close = {part: {**found, "compiled": 3.1e12} for part, found in DECODING["flops"].items()}
    close_parts = tables.sections({**DECODING, "flops": close})
    assert not any("does more than" in note for part in close_parts for note in part.notes)
    two = tables.sections({**DECODING, "search_loops": 2})
    assert any("has 2 loops of unknown length" in note for part in two for note in part.notes)
    # Without a price there is no such row; nor are there rows of a training step.
    names = [
        row[0]
        for part in tables.sections({**DECODING, "price_per_chip_hour": None})
        for row in part.rows
    ]
    assert not any("price" in name for name in names)
    assert "days to 10^12 source tokens" not in names


def test_decoding_without_a_clock_or_a_text_has_no_time() -> None:
    unknown = {"compute": None, "communication": {}, "total": None}
    seconds = {"encoding": unknown, "step": unknown}
    v6e = {**DECODING, "topology": "v6e:16x16", "search_seconds": seconds}
    without = {k: v for k, v in DECODING.items() if k not in ("collectives", "search_seconds")}
    bare = {key: PART[key] for key in ("forward", "model", "executed")}
    unread = {**without, "no_text": "RET_CHECK", "flops": {"encoding": bare, "step": bare}}
    gpus = {**DECODING, "topology": "h100:16x8"}
    del gpus["search_seconds"]
    for facts, why in (
        (v6e, "clock of this chip is not published"),
        (unread, "collectives and step time are unknown"),
        (gpus, "XLA estimates no cycles for GPUs"),
    ):
        assert decoding_tables.costs(facts) is None
        text = " ".join(said(facts).split())
        assert why in text
        assert "executed, by arithmetic" in text
        assert "sentences a second" not in text


def test_files_are_escaped_and_self_contained(tmp_path: Path) -> None:
    facts = {**FACTS, "config": "<script>a|b</script>", "versions": {"jax": "<img src=x>"}}
    paths = tables.write(facts, tmp_path / "plan")
    assert [path.name for path in paths] == ["plan.json", "plan.md", "plan.html"]
    assert set(tmp_path.iterdir()) == set(paths)
    assert json.loads(paths[0].read_text("utf-8")) == facts
    html = paths[2].read_text("utf-8")
    assert "<script" not in html
    assert "<img src=x" not in html
    assert "&lt;script&gt;" in html
    assert "default-src 'none'" in html
    assert "http" not in html.replace("http-equiv", "")
    markdown = paths[1].read_text("utf-8")
    assert "<script" not in markdown
    assert "a\\|b" in markdown


def test_files_are_named_after_what_was_planned() -> None:
    assert tables.file_name(FACTS) == "moe_2048e_36l.v3-32x32"
    assert tables.file_name({**FACTS, "program": "decode"}) == "moe_2048e_36l.v3-32x32.decode"
