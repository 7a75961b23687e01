"""Plans all models of the GShard paper (arXiv 2006.16668), in one table: `make plan-paper`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from m4.parallel.platform.hardware import code_digest
from m4.parallel.platform.machines import GIB, topology
from m4.plan import launch, report
from m4.plan.report import TABLE3, paper_model, paper_row_of, paper_step
from m4.storage.files import read_json


class Case(NamedTuple):
    """A config of the family on its machine, with changes; `label` is "" where it has none."""

    config: str
    topology: str
    label: str = ""
    bindings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The stem of its files."""
        label = f".{self.label.replace(' ', '_')}" if self.label else ""
        return f"{self.config}.{self.topology.replace(':', '-')}{label}"


_QUARTER = ("quarter batch", ("BATCH_SIZE = 2048",))
_REPLICATED = ("mesh.make_mesh.data = -1", "mesh.make_mesh.fsdp = 1")
# 2,048 tokens a core of source and of target, except with 128 experts and the full batch.
CASES = (
    Case("moe_128e_12l", "v3:8x8"),
    Case("moe_128e_12l", "v3:8x8", *_QUARTER),
    Case("moe_512e_12l", "v3:16x16"),
    Case("moe_2048e_12l", "v3:32x32"),
    Case("moe_128e_36l", "v3:8x8"),
    Case("moe_128e_36l", "v3:8x8", *_QUARTER),
    Case("moe_512e_36l", "v3:16x16"),
    Case("moe_2048e_36l", "v3:32x32"),
    Case("moe_2048e_60l", "v3:32x32"),
    Case("moe_2048e_60l", "v3:32x32", "bfloat16", ("transformer.Transformer.dtype = 'bfloat16'",)),
    Case(
        "moe_2048e_60l", "v3:32x32", "replicated weights", ("experiment.Training.fsdp_axes = ()",)
    ),
    Case("t_96l", "v3:32x32"),
    Case("t_96l", "v3:32x32", "replicated weights", _REPLICATED),
)
_COLLECTIVES = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute")
_HEADER = (
    *("model", "cores", "10^9 parameters (paper)", "weights, replicated", "of experts"),
    *("temporaries", "total", *_COLLECTIVES, "TFLOP", "compute, s", "exchange, s"),
    *("step, s", "paper, s", "model / paper", "days to 10^12 (paper)", "core-years (paper)"),
    "CPU s to compile",
)


def run(configs: Path, output: Path, console: Console) -> None:
    """Compiles each of `CASES` that has no plan yet from the same config, code and versions.

    `output` gets the plans, and family.json and family.md, their table.
    """
    rows = []
    for number, case in enumerate(CASES, start=1):
        config = configs / f"{case.config}.gin"
        words = [f"--gin_file={config}", *(f"--gin_bindings={each}" for each in case.bindings)]
        identity = {
            "arguments": [*words, f"--topology={case.topology}"],
            "config": config.read_text(encoding="utf-8"),
            "versions": launch.versions(),
            "code": code_digest(),
        }
        path = output / f"{case.name}.json"
        facts = read_json(path) if path.is_file() else {}
        done = "reused"
        if facts.get("identity") != identity or facts.get("format") != launch.FORMAT:
            facts = launch.compiled(case.config, words, case.topology, "train", console)
            facts |= {"label": case.label, "identity": identity}
            report.write(report.report(facts), path.with_suffix(""), facts)
            done = "compiled"
        rows.append(facts)
        line = f"{number}/{len(CASES)} {case.name}: {done}; {report.verdict(facts)}"
        console.print(line, highlight=False, soft_wrap=True)
    for written in report.write(family(rows), output / "family", {"rows": rows}):
        console.print(str(written), highlight=False, soft_wrap=True)


def family(rows: Sequence[Mapping[str, Any]]) -> report.Report:
    """Returns the table of all plans: memory, traffic and time next to the paper's Table 3."""
    others = [row for row in TABLE3 if row.tokens != report.TOKENS]
    return report.Report(
        "The family of the GShard paper, compiled for its TPU v3 pods",
        f"{sum('refused' not in row for row in rows)} of {len(rows)} fit their machine",
        [_HEADER, *map(_row, rows)],
        [
            "Memory is in GiB a core, of 16. Collectives a step: how often, and payload in GiB a "
            "core. Exchange is the time of the all-to-all.",
            *report.time_notes(topology("v3:8x8")),
            *(
                f"The paper's days and core-years of {row.model} are of "
                f"{row.tokens / 10**12:g} * 10^12 pieces."
                for row in others
            ),
        ],
    )


def label(facts: Mapping[str, Any]) -> str:
    """Returns a plan's name, such as "(1) MoE(2048E, 36L), bfloat16"."""
    printed = paper_row_of(facts["config"])
    name = printed.model if printed else facts["config"]
    return f"{name}, {facts['label']}" if facts.get("label") else name


def _row(facts: Mapping[str, Any]) -> tuple[str, ...]:
    model = paper_model(facts)
    size = f"{sum(facts['parameters'].values()) / 1e9:,.1f}"
    cells = [label(facts), f"{facts['devices']:,}"]
    cells.append(f"{size} ({model.parameters / 1e9:,g})" if model else size)
    if "refused" in facts:
        cells += ["", "", "", f"does not fit: {facts['refused']['message']}"]
    else:
        held = facts["memory_bytes"]
        kinds = ("replicated weights", "expert weights", "temporaries")
        sizes = [*(held[kind] for kind in kinds), sum(held.values())]
        cells += [f"{size / GIB:.2f}" for size in sizes]
    for kind in _COLLECTIVES:
        total = facts.get("collectives", {}).get(kind)
        found = f"{total['count']:,} x, {total['payload_bytes'] / GIB:.2f}" if total else ""
        cells.append(found)
    cells += _seconds(facts)
    return (*cells, f"{facts['compiler']['compile_cpu_seconds']:.0f}")


def _seconds(facts: Mapping[str, Any]) -> list[str]:
    cost = report.costs(facts)
    if cost is None:
        return [""] * 8
    seconds, compare = facts["seconds"]["step"], paper_step(facts)
    exchange = seconds["communication"].get("all-to-all", 0.0)
    found = [f"{facts['flops']['step']['traced'] / 1e12:.1f}"]
    found += [f"{n:.3f}" for n in (seconds["compute"], exchange, seconds["total"])]
    if compare and compare.steps_per_second:
        paper = compare.steps_per_second
        found += [f"{1 / paper:.3f}", f"{seconds['total'] * paper:.2f}"]
    else:
        found += ["", ""]
    days, years = (compare.days, compare.core_years) if compare else (None, None)
    found.append(f"{cost['days']:.1f}" + (f" ({days})" if days else ""))
    found.append(f"{cost['device_years']:.1f}" + (f" ({years})" if years else ""))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=Path, default=Path("gin_configs"))
    parser.add_argument("--output", type=Path, default=Path("runs/plans"))
    options = parser.parse_args()
    run(options.configs, options.output, Console(width=None if sys.stdout.isatty() else 120))


if __name__ == "__main__":
    main()
