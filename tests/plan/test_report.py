"""The table of a plan, and the table of the paper's family."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from m4.parallel.platform.machines import GIB
from m4.plan import report
from scripts import plan_paper

FACTS: dict[str, Any] = json.loads("""{
"format": 9, "config": "moe_2048e_36l", "program": "train", "topology": "v3:32x32", "devices": 2048,
"device_bytes": 17179869184, "versions": {"jax": "1", "libtpu": "2"},
"batch": {"rows": 32768, "source_length": 128, "target_length": 128, "beams": 1},
"model": {"vocab_size": 32000, "source_vocab_size": 64000, "directions": 100, "dtype": "float32"},
"parameters": {"experts": 600000000000, "attention": 19000000000},
"given_bytes": {"replicated weights": 1073741824, "expert weights": 2147483648},
"memory_bytes": {"replicated weights": 1073741824, "expert weights": 2147483648,
 "temporaries": 6442450944},
"collectives": {"all-to-all": {"count": 108, "payload_bytes": 1073741824, "sent_bytes": 536870912}},
"sent_bytes": {"ici": 536870912, "dcn": 0.0}, "unknown_loops": 0, "uncosted": {"step": 0},
"seconds": {"step": {"compute": 0.8, "communication": {"all-to-all": 0.2}, "total": 1.0}},
"flops": {"step": {"forward": {"logits": 1e9, "dense": 0.0}, "model": 3e12, "executed": 4e12,
 "traced": 4.1e12, "kernels": 0.0}},
"compiler": {"trace_seconds": 1.0, "compile_seconds": 2.0, "compile_cpu_seconds": 2.5,
 "cpu_seconds": 3.0, "host_bytes": 4294967296}}""")
REFUSED = {key: value for key, value in FACTS.items() if key not in ("memory_bytes", "seconds")}
REFUSED["refused"] = {"message": "Ran out of memory", "advice": ["a smaller batch"]}


def cells(facts: dict[str, Any]) -> dict[str, str]:
    """Returns name -> value of the rows of a plan."""
    return {name: value for _, name, value in report.report(facts).rows}


def notes(facts: dict[str, Any]) -> str:
    return " ".join(report.report(facts).notes)


def test_costs_follow_from_the_time_of_a_step() -> None:
    found = report.costs(FACTS)
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
    unknown = {"step": {"compute": None, "communication": {}, "total": None}}
    assert report.costs({**FACTS, "seconds": unknown}) is None


def test_verdict_and_loops() -> None:
    assert report.verdict(FACTS) == "fits: 9.00 of 16 GiB a device at most"
    assert "counts once" in notes({**FACTS, "unknown_loops": 1})


def test_slices_have_separate_figures_for_each_network() -> None:
    sent = {"count": 46, "payload_bytes": GIB / 4, "sent_bytes": GIB / 4}
    facts = {
        **FACTS,
        "topology": "2*v5e:16x16",
        "collectives": {**FACTS["collectives"], "all-reduce between slices": sent},
        "sent_bytes": {"ici": GIB / 2, "dcn": GIB / 4},
    }
    found = cells(facts)
    assert found["all, inside a slice (ICI)"] == "0.500"
    assert found["all, between slices (DCN)"] == "0.250"
    assert found["all-reduce between slices, 46 x"] == "0.250, 0.250"
    assert "all, inside a slice (ICI)" not in cells(FACTS)
    assert report.file_name(facts) == "moe_2048e_36l.2xv5e-16x16"


def test_program_that_does_not_fit_has_advice() -> None:
    assert report.verdict(REFUSED) == "does not fit: Ran out of memory"
    assert notes(REFUSED) == "would help: a smaller batch"
    # The cost of compiling it is there too.
    assert cells(REFUSED)["seconds to trace, to compile"] == "1, 2"


PART = {"forward": {"logits": 1e9}, "model": 2e12, "executed": 3e12, "kernels": 0.0}
DECODING: dict[str, Any] = {
    **FACTS,
    "program": "decode",
    "batch": {"rows": 2048, "source_length": 128, "target_length": 100, "beams": 4},
    "flops": {"encoding": PART, "step": PART},
    "unknown_loops": 1,
    "uncosted": {"encoding": 0, "step": 7},
    "seconds": {
        "encoding": {"compute": 2.0, "communication": {"all-to-all": 1.0}, "total": 3.0},
        "step": {"compute": 0.04, "communication": {"all-reduce": 0.01}, "total": 0.05},
    },
    "price_per_chip_hour": 2.0,
}


def test_decoding_costs_have_all_steps_of_a_batch() -> None:
    found = report.costs(DECODING)
    assert found is not None
    # 3 s and a hundred steps of 0.05 s are 8 s for 2,048 sentences, 256 a second; 10^6 of them take
    # 3,906.25 s, with 1,024 chips 1,111.1 hours of a chip.
    assert found["batch_seconds"] == pytest.approx(8.0)
    assert found["sentences_per_second"] == pytest.approx(256.0)
    assert found["chip_hours"] == pytest.approx(1111.11, abs=0.01)
    rows = report.report(DECODING).rows
    assert ("seconds, a model: encoding", "total", "3.0000") in rows
    assert ("seconds, a model: decoding step", "total", "0.0500") in rows
    assert ("FLOPs, 10^12: decoding step", "of the model", "2.0000") in rows
    assert ("FLOPs, 10^12: decoding step", "forward: logits", "0.0010") in rows
    assert cells(DECODING)["price, at 2 a chip and hour"] == "2,222"
    assert "days to 10^12 source tokens" not in cells(DECODING)
    text = notes(DECODING)
    assert "at most 100; the search's loop counts once" in text
    assert "7 operations of the decoding step have no estimate of cycles" in text


def test_decoding_without_a_clock_has_no_time() -> None:
    unknown = {"compute": None, "communication": {}, "total": None}
    v6e = {**DECODING, "topology": "v6e:16x16", "seconds": dict.fromkeys(PART, unknown)}
    gpus = {key: value for key, value in DECODING.items() if key != "seconds"}
    for facts in (v6e, {**gpus, "topology": "h100:16x8"}):
        assert report.costs(facts) is None
        assert "No time model" in notes(facts)
        assert "sentences/s" not in cells(facts)


def test_files_are_named_after_the_plan_and_escaped(tmp_path: Path) -> None:
    assert report.file_name(FACTS) == "moe_2048e_36l.v3-32x32"
    assert report.file_name({**FACTS, "program": "decode"}) == "moe_2048e_36l.v3-32x32.decode"
    name = "<script>a|b</script>\n[x](y) ![i](y) `c` *b* _e_ &lt; in_words"
    facts = {**FACTS, "config": name, "versions": {"jax": "<img src=x>"}}
    paths = report.write(report.report(facts), tmp_path / "plan", facts)
    assert [path.name for path in paths] == ["plan.json", "plan.md"]
    assert set(tmp_path.iterdir()) == set(paths)
    assert json.loads(paths[0].read_text("utf-8")) == facts
    markdown = paths[1].read_text("utf-8")
    shown = r"\<script>a\|b\</script> [x]\(y) ![i]\(y) \`c\` \*b\* \_e\_ \&lt; in_words on v3:32x32"
    assert markdown.startswith(f"# {shown}")
    assert r"\<img src=x>" in markdown
    stream = io.StringIO()
    report.show(report.report(FACTS), Console(file=stream, width=160))
    assert "fits: 9.00 of 16 GiB" in stream.getvalue()


# ------------------------------------------------------------------------------- the family

# Config -> our model's step over the paper's, in the table of docs/pod.md.
RATIOS: dict[str, float] = {}
for row in plan_paper.TABLE3:
    for line in (Path(__file__).parents[2] / "docs/pod.md").read_text("utf-8").splitlines():
        if line.startswith(f"| {row.model} |") and row.steps_per_second:
            RATIOS[row.config] = float(line.split("|")[-3]) * row.steps_per_second


def test_every_plan_has_a_row_with_the_papers_figures() -> None:
    quarter = {"config": "moe_128e_12l", "label": "quarter batch", "devices": 128}
    rows = [FACTS, {**FACTS, **quarter}, {**REFUSED, "label": "bfloat16", "config": "t_96l"}]
    header, *table = plan_paper.family(rows).rows
    assert {len(row) for row in table} == {len(header)}
    first, second, third = (dict(zip(header, row, strict=True)) for row in table)
    assert first["model"] == "(1) MoE(2048E, 36L)"
    assert first["10^9 parameters (paper)"] == "619.0 (600)"
    assert first["all-to-all"] == "108 x, 1.00"
    # 1 s against 1 / 0.72 s.
    assert (first["paper, s"], first["model / paper"]) == ("1.389", "0.72")
    assert first["days to 10^12 (paper)"] == "2.8 (4.0)"
    assert first["core-years (paper)"] == "15.5 (22.4)"
    # With another batch than the paper's there is nothing to compare.
    assert second["model"] == "(6) MoE(128E, 12L), quarter batch"
    assert (second["step, s"], second["paper, s"], second["model / paper"]) == ("1.000", "", "")
    batch, parameters = FACTS["batch"], FACTS["parameters"]
    others = [
        {"devices": 1024},
        {"config": "mine"},
        {"topology": "v4:8x16x16"},
        {"batch": {**batch, "source_length": 64}},
        # 519 of 600 billion are 13.5% less: another model.
        {"parameters": {**parameters, "experts": 500_000_000_000}},
    ]
    for other in others:
        assert "model / paper" not in cells({**FACTS, **other}), other
        shown = "the paper (table 1)" in cells({**FACTS, **other})
        assert shown == other.keys().isdisjoint({"config", "parameters"}), other
    # 554 of 600 billion are 7.7% less: the same model.
    near = {"parameters": {**parameters, "experts": 535_000_000_000}}
    assert cells({**FACTS, **near})["the paper (table 1)"] == "600,000,000,000"
    assert cells(FACTS)["the paper's step (table 3), s"] == "1.389"
    assert cells(FACTS)["model / paper"] == "0.72"
    assert third["total"] == "does not fit: Ran out of memory"
    assert third["step, s"] == ""


def test_the_family_compiles_only_missing_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def compiled(config, arguments, machine, job, console):
        asked.append((config, machine, arguments[-1]))
        cores = {"v3:8x8": 128, "v3:16x16": 512, "v3:32x32": 2048}[machine]
        return {**FACTS, "config": config, "topology": machine, "devices": cores}

    monkeypatch.setattr("m4.plan.launch.compiled", compiled)
    folder = Path(__file__).parents[2] / "gin_configs"
    for _ in range(2):  # the second time all are kept
        plan_paper.run(folder, tmp_path, Console(file=io.StringIO()))
        assert len(asked) == len(plan_paper.CASES)
    assert ("t_96l", "v3:32x32", "--gin_bindings=mesh.make_mesh.fsdp = 1") in asked
    path = next(tmp_path.glob("moe_128e_12l.*.json"))
    path.write_text(path.read_text("utf-8").replace("BATCH_SIZE", "SIZE"), encoding="utf-8")
    plan_paper.run(folder, tmp_path, Console(file=io.StringIO()))
    assert len(asked) == len(plan_paper.CASES) + 1


def test_the_family_is_the_papers() -> None:
    assert {case.config for case in plan_paper.CASES} == {row.config for row in plan_paper.TABLE3}
    assert len({case.name for case in plan_paper.CASES}) == len(plan_paper.CASES)


@pytest.mark.parametrize("config", RATIOS)
def test_papers_days_and_core_years_follow_from_its_steps_a_second(config: str) -> None:
    row = plan_paper.paper_row_of(config)
    assert row is not None
    assert row.steps_per_second is not None
    # (1): 10^12 / (4 * 10^6 * 0.72) s / 86,400 s = 4.0188 days, times 2048 / 365: 22.549 years.
    days = 1e12 / (row.batch_tokens * row.steps_per_second) / 86_400
    # As printed, to the last digit: (2) is 1.346, printed 1.4.
    assert days == pytest.approx(float(row.days or 0), abs=0.06)
    # The paper's core-years come from rounded days: (1) 4.0 * 2048 / 365 = 22.4.
    years = float(row.core_years or 0)
    assert days * row.cores / 365 == pytest.approx(years, rel=8e-3, abs=0.06)


def test_error_of_the_time_model_is_that_of_the_documents_table() -> None:
    for cores, (low, high) in zip(((512, 2048), (128,)), report.ERROR.values(), strict=True):
        some = [RATIOS[row.config] for row in plan_paper.TABLE3
                if row.cores in cores and row.config in RATIOS]  # fmt: skip
        assert (min(some), max(some)) == pytest.approx((low, high), abs=5e-3)
