"""The whole family of the GShard paper planned at once: one table and its pictures."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from m4.parallel.consistency_check import code_digest
from m4.plan import launch, pictures, report, table3
from m4.plan.machines import GIB
from m4.plan.section import MODEL_NOTE, Section

Row = tuple[str, ...]


class Case(NamedTuple):
    """A config of the family on its machine, with changes; label "" is the config as it is."""

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
_COPIES = ("mesh.make_mesh.data = -1", "mesh.make_mesh.fsdp = 1")
# Equal tokens a core are 2,048 of each side, which all but the two of 128 experts have.
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
    Case("moe_2048e_60l", "v3:32x32", "whole weights", ("loop.train.zero = ()",)),
    Case("t_96l", "v3:32x32"),
    Case(
        "t_96l",
        "v3:32x32",
        "whole weights",
        ("mesh.make_mesh.data = -1", "mesh.make_mesh.fsdp = 1"),
    ),
)


def sweep(parsed: argparse.Namespace, bindings: Sequence[str], console: Console) -> int:
    """Plans every case, writes family.{json,md,html,png,pdf}; returns the exit status.

    A case whose JSON is in the folder, made by the same arguments, config and versions, is not
    compiled again; with --keep not even where m4's code has changed.

    Raises:
        ValueError: a config that is not there; mistakes of `m4.plan.job.compiled`.
    """
    from m4.plan.job import compiled  # it starts this one

    folder, given = Path(parsed.configs), [*parsed.gin_bindings, *bindings]
    for case in CASES:
        if not (folder / f"{case.config}.gin").is_file():
            raise ValueError(f"--configs={folder}: it has no {case.config}.gin")
    rows = []
    for number, case in enumerate(CASES, start=1):
        path = parsed.output / f"{case.name}.json"
        arguments = [
            f"--gin_file={folder / f'{case.config}.gin'}",
            f"--gin_search_paths={parsed.gin_search_paths}",
            f"--languages={parsed.languages}",
            *(f"--gin_bindings={binding}" for binding in [*case.bindings, *given]),
        ]
        identity = made_of(arguments, case, folder)
        facts = kept(path, identity, parsed.keep)
        told = "kept" if facts else "compiled"
        if facts is None:
            facts = compiled(case.config, arguments, case.topology, "train", console)
            facts |= {"label": case.label, "identity": identity, "code": code_digest()}
            report.write(facts, path.with_suffix(""))
        rows.append(facts)
        console.print(
            f"{number}/{len(CASES)} {case.name}: {told}; {report.verdict(facts)}",
            highlight=False,
            soft_wrap=True,
        )
    for written in write(rows, parsed.output / "family"):
        console.print(str(written), highlight=False, soft_wrap=True)
    return 0


def made_of(arguments: Sequence[str], case: Case, folder: Path) -> dict[str, Any]:
    """What decides a plan, but for m4's own code."""
    return {
        "arguments": [*arguments, f"--topology={case.topology}"],
        "config": (folder / f"{case.config}.gin").read_text(encoding="utf-8"),
        "versions": launch.versions(),
    }


def kept(path: Path, identity: Mapping[str, Any], other_code: bool) -> dict[str, Any] | None:
    """The facts that are in the file, if the same made them; None: they are to be made."""
    if not path.is_file():
        return None
    facts = json.loads(path.read_text(encoding="utf-8"))
    same = facts.get("identity") == identity and facts.get("format") == launch.FORMAT
    return facts if same and (other_code or facts.get("code") == code_digest()) else None


def write(rows: Sequence[Mapping[str, Any]], stem: Path) -> list[Path]:
    """The table and the pictures of all plans."""
    images = pictures.draw(rows, stem)
    parts = [*tables(rows), Section("Pictures", pictures.NOTES, (), pictures.as_text(rows))]
    text = json.dumps({"rows": rows}, ensure_ascii=False, indent=1) + "\n"
    verdict = f"{sum('refused' not in row for row in rows)} of {len(rows)} fit their machine"
    title = "The family of the GShard paper, compiled for its TPU v3 pods"
    return [*report.write_pages(stem, title, verdict, parts, text), *images]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Memory, traffic, time beside Table 3, and what compiling took: a row a plan."""
    memory: list[Row] = [_MEMORY]
    sent: list[Row] = [_SENT]
    time: list[Row] = [_TIME]
    made: list[Row] = [_MADE]
    for facts in rows:
        name = label(facts)
        size = f"{sum(facts['parameters'].values()) / 1e9:,.1f}"
        model = report.paper_model(facts)
        paper = f"{model.parameters / 1e9:,g}" if model else ""
        head = (name, f"{facts['devices']:,}", size, paper)
        cost = facts["compiler"]
        made.append(
            (
                name,
                f"{cost['trace_seconds']:.0f}",
                f"{cost['compile_seconds']:.0f}",
                f"{cost['cpu_seconds']:.0f}",
                f"{cost['host_bytes'] / GIB:.1f}",
            )
        )
        if "refused" in facts:
            memory.append((*head, *[""] * 4, f"does not fit: {facts['refused']['message']}"))
            continue
        by_kind = facts["memory_bytes"]
        kinds = ("replicated weights", "expert weights", "optimizer state", "temporaries")
        cells = [f"{by_kind[kind] / GIB:.2f}" for kind in kinds]
        memory.append((*head, *cells, f"{sum(by_kind.values()) / GIB:.2f}"))
        if "collectives" in facts:
            sent.append((name, *[_traffic(facts, kind) for kind in _SENT[1:]]))
            time.append((name, *_seconds(facts)))
    return [
        Section("Memory, GiB a device", ["Of 16 GiB a core of TPU v3."], memory),
        Section("Collectives a step: number x, GiB a device", (), sent),
        Section("Time of a step: a model", [MODEL_NOTE, _OTHER_TOKENS], time),
        Section("Compiling", ["Two cores; seconds by the clock depend on what else runs."], made),
    ]


_MEMORY: Row = (
    "model",
    "cores",
    "10^9 parameters",
    "paper",
    "replicated weights",
    "expert weights",
    "optimizer",
    "temporaries",
    "together",
)
_SENT: Row = (
    "model",
    "all-to-all",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
)
_TIME: Row = (
    "model",
    "TFLOP a core",
    "compute, s",
    "all-to-all, s",
    "other, s",
    "step, s",
    "paper, s",
    "model / paper",
    "days to 10^12",
    "paper",
    "core-years",
    "paper",
)
_OTHER_TOKENS = " ".join(
    f"The paper's days and core-years of {row.model} are of {row.tokens / 10**12:g} * 10^12 pieces."
    for row in table3.TABLE3
    if row.tokens != table3.TOKENS
)
_MADE: Row = ("model", "tracing, s", "compiling, s", "CPU, s", "host memory, GiB")


def label(facts: Mapping[str, Any]) -> str:
    """ "(1) MoE(2048E, 36L), bfloat16"."""
    printed = table3.row_of(facts["config"])
    name = printed.model if printed else facts["config"]
    return f"{name}, {facts['label']}" if facts.get("label") else name


def _traffic(facts: Mapping[str, Any], kind: str) -> str:
    total = facts["collectives"].get(kind)
    return "" if total is None else f"{total['count']:,} x, {total['payload_bytes'] / GIB:.2f}"


def _seconds(facts: Mapping[str, Any]) -> list[str]:
    seconds, cost = facts["step_seconds"], report.costs(facts)
    if cost is None:
        return [""] * (len(_TIME) - 1)
    exchange = seconds["communication"].get("all-to-all", 0.0)
    other = sum(seconds["communication"].values()) - exchange
    found = [
        f"{facts['flops']['traced'] / 1e12:.1f}",
        *(f"{n:.3f}" for n in (seconds["compute"], exchange, other, seconds["total"])),
    ]
    compare = report.paper_step(facts)
    paper = compare.steps_per_second if compare else None
    if paper:
        found += [f"{1 / float(paper):.3f}", f"{seconds['total'] * float(paper):.2f}"]
    else:
        found += ["", ""]
    days, years = (compare.days, compare.core_years) if compare else (None, None)
    return [*found, f"{cost['days']:.1f}", days or "", f"{cost['core_years']:.1f}", years or ""]
