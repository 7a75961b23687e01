"""The table and the pictures of a family of plans."""

import json
from pathlib import Path
from typing import Any

import pytest

from m4.plan import sweep
from m4.plan.report import pictures
from tests.command_line import m4
from tests.plan.report.test_tables import FACTS, REFUSED


def rows() -> list[dict[str, Any]]:
    """Plans of 12, 36 and 60 layers, and one that does not fit."""
    found = []
    for config, layers, cores, label in (
        ("moe_128e_12l", 12, 128, "quarter batch"),
        ("moe_512e_12l", 12, 512, ""),
        ("moe_2048e_12l", 12, 2048, ""),
        ("moe_512e_36l", 36, 512, ""),
        ("moe_2048e_36l", 36, 2048, ""),
        ("moe_2048e_60l", 60, 2048, ""),
    ):
        model = {"encoder_layers": layers // 2, "decoder_layers": layers // 2, "experts": cores}
        batch = {**FACTS["batch"], "rows": 16 * cores}
        about = {"config": config, "devices": cores, "label": label, "batch": batch}
        found.append({**FACTS, **about, "model": {**FACTS["model"], **model}})
    unread = {k: v for k, v in found[-1].items() if k not in ("collectives", "step_seconds")}
    found.append({**unread, "no_text": "RET_CHECK"})
    found.append({**found[0], **REFUSED, "label": "replicated weights", "config": "t_96l"})
    return found


def test_every_plan_has_a_row_with_the_papers_figures() -> None:
    memory, sent, time, growth, made = sweep.family_tables(rows())
    assert len(memory.rows) == len(made.rows) == 1 + 8
    assert len(sent.rows) == len(time.rows) == 1 + 6  # neither the unread nor the refused one
    for section in (memory, sent, time, growth, made):
        assert {len(row) for row in section.rows} == {len(section.rows[0])}
    of = {row[0]: row for row in time.rows}
    # 1 s against 1 / 0.72 s.
    row = of["(1) MoE(2048E, 36L)"]
    assert row[6:8] == ("1.389", "0.72")
    # With another batch than the paper's there is nothing to compare.
    assert of["(6) MoE(128E, 12L), quarter batch"][6:8] == ("", "")
    # All take 1 s, 0.2 of it for the exchange; only 12 layers have both sizes.
    assert growth.rows[1:] == [
        ("12 layers", "20%", "20%", "1.00", "1.00"),
        ("the paper, section 5.2", "16%", "36%", "3.75", "1.7"),
    ]
    assert len(sweep.family_tables(rows()[:2])) == 4
    assert memory.rows[-1][0] == "T(96L), replicated weights"
    assert memory.rows[-1][-1] == "does not fit: Ran out of memory"


def test_same_plans_give_the_same_files(tmp_path: Path) -> None:
    first = sweep.write(rows(), tmp_path / "a" / "family")
    second = sweep.write(rows(), tmp_path / "b" / "family")
    assert {path.suffix for path in first} == {".json", ".md", ".html", ".png", ".pdf"}
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    html = first[2].read_text("utf-8")
    assert "data:image/png;base64," in html
    assert len(json.loads(first[0].read_text("utf-8"))["rows"]) == 8


def test_pictures_show_plans_of_equal_tokens_a_core() -> None:
    panels: Any = pictures.figure(rows()).axes
    by_devices, by_depth, seconds, sent = panels
    assert [label.get_text() for label in by_devices.get_xticklabels()] == [
        "128\n12L",
        "512\n12L",
        "2048\n12L",
        "512\n36L",
        "2048\n36L",
    ]
    assert [label.get_text() for label in by_depth.get_xticklabels()] == [
        "12L",
        "36L",
        "60L",
        "60L",
    ]
    # 1 GiB of weights, 2 of experts, 6 of temporaries, one on the other.
    tops = {patch.get_y() + patch.get_height() for patch in by_devices.patches}
    assert tops == {1, 3, 9}
    assert [len(line.get_xdata()) for line in seconds.lines] == [3, 2]
    assert {float(y) for line in sent.lines for y in line.get_ydata()} == {1.0, 0.0}
    # More tokens a core than the others: not in the picture.
    more = {**rows()[0], "batch": {**FACTS["batch"], "rows": 64 * 128}}
    assert not pictures.figure([more]).axes[0].patches


def test_plan_is_reused_if_made_from_the_same(tmp_path: Path) -> None:
    path, identity = tmp_path / "plan.json", {"arguments": ["a"]}
    assert sweep.reusable(path, identity, True) is None
    facts = {"identity": identity, "code": "another", "format": sweep.launch.FORMAT}
    path.write_text(json.dumps(facts), encoding="utf-8")
    assert sweep.reusable(path, identity, True) == facts
    assert sweep.reusable(path, identity, False) is None
    assert sweep.reusable(path, {"arguments": ["b"]}, True) is None
    path.write_text(json.dumps({**facts, "code": sweep.code_digest()}), encoding="utf-8")
    assert sweep.reusable(path, identity, False) is not None
    # What another m4 wrote may lack what this one shows.
    for other in ({"format": sweep.launch.FORMAT - 1}, {"format": None}):
        path.write_text(json.dumps({**facts, **other}), encoding="utf-8")
        assert sweep.reusable(path, identity, True) is None


def test_sweep_compiles_only_missing_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compiled(config, arguments, machine, job, console):
        asked.append((config, machine, arguments[-1]))
        cores = {"v3:8x8": 128, "v3:16x16": 512, "v3:32x32": 2048}[machine]
        model = {**FACTS["model"], "encoder_layers": 6, "decoder_layers": 6, "experts": cores}
        return {**FACTS, "config": config, "topology": machine, "devices": cores, "model": model}

    monkeypatch.setattr("m4.plan.launch.compiled", compiled)
    folder = Path(__file__).parents[2] / "gin_configs"
    said = m4("plan", "--sweep", f"--configs={folder}", f"--output={tmp_path}")
    assert said.status == 0, said.err
    assert len(asked) == len(sweep.CASES)
    assert ("t_96l", "v3:32x32", "--gin_bindings=mesh.make_mesh.fsdp = 1") in asked
    m4("plan", "--sweep", f"--configs={folder}", f"--output={tmp_path}")
    assert len(asked) == len(sweep.CASES)  # all are kept
    said = m4("plan", "--sweep", f"--configs={tmp_path}", f"--output={tmp_path}")
    assert "no moe_128e_12l.gin in it" in said.mistake


def test_sweep_passes_arguments_on_or_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def compiled(config, arguments, machine, job, console):
        asked.append(arguments)
        raise ValueError("enough")

    monkeypatch.setattr("m4.plan.launch.compiled", compiled)
    folder = Path(__file__).parents[2] / "gin_configs"
    both = ("--gin_bindings=DROPOUT_RATE = 0.0", "--gin.BATCH_SIZE=512")
    with pytest.raises(ValueError, match="enough"):
        m4("plan", "--sweep", f"--configs={folder}", f"--output={tmp_path}", *both)
    assert asked[0][-2:] == [
        "--gin_bindings=DROPOUT_RATE = 0.0",
        "--gin_bindings=BATCH_SIZE = 512",
    ]
    for argument in (
        "--gin_file=mine.gin",
        "--model_dir=runs/mine",
        "--topology=v4:4x4x4",
        "--program=decode",
        "--price_per_chip_hour=2.0",
    ):
        said = m4("plan", "--sweep", f"--configs={folder}", f"--output={tmp_path}", argument)
        assert argument.split("=")[0] in said.mistake
    assert len(asked) == 1


def test_the_family_is_the_papers() -> None:
    assert {case.config for case in sweep.CASES} == {row.config for row in sweep.table3.TABLE3}
    assert len({case.name for case in sweep.CASES}) == len(sweep.CASES)
