"""All models of the GShard paper planned at once: one table and its pictures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from m4.parallel.consistency_check import code_digest
from m4.plan import launch, table3
from m4.plan.machines import GIB, topology
from m4.plan.report import pages, pictures, tables
from m4.plan.report.pages import Section
from m4.plan.report.wording import model_notes
from m4.settings import InputError
from m4.storage.files import read_json


class Case(NamedTuple):
    """A config of the family on its machine, with changes; label "": the config unchanged."""

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


@dataclass(frozen=True)
class Sweep:
    """All plans of `CASES`, and one page of them.

    Attributes:
        configs: folder of the cases' gin files. output: folder of the plans and of
            family.{json,md,html,png,pdf}.
        arguments, bindings: of the command line, for every case; bindings come after its own.
        reuse: reuse plans made by other versions of m4's code too.
    """

    configs: Path
    output: Path
    arguments: Sequence[str]
    bindings: Sequence[str]
    reuse: bool = False

    def run(self, console: Console) -> None:
        """Compiles each case that has no plan yet from the same config, arguments and versions.

        Raises:
            ValueError: a config is missing; mistakes of `m4.plan.launch.compiled`.
        """
        for case in CASES:
            if not self._config(case).is_file():
                raise InputError(f"--configs={self.configs}: no {case.config}.gin in it")
        rows = []
        for number, case in enumerate(CASES, start=1):
            path = self.output / f"{case.name}.json"
            identity = self.identity(case)
            facts = reusable(path, identity, self.reuse)
            done = "reused" if facts else "compiled"
            if facts is None:
                arguments = self._arguments(case)
                facts = launch.compiled(case.config, arguments, case.topology, "train", console)
                facts |= {"label": case.label, "identity": identity, "code": code_digest()}
                tables.write(facts, path.with_suffix(""))
            rows.append(facts)
            line = f"{number}/{len(CASES)} {case.name}: {done}; {tables.verdict(facts)}"
            console.print(line, highlight=False, soft_wrap=True)
        for written in write(rows, self.output / "family"):
            console.print(str(written), highlight=False, soft_wrap=True)

    def identity(self, case: Case) -> dict[str, Any]:
        """What decides a plan, except for m4's own code."""
        return {
            "arguments": [*self._arguments(case), f"--topology={case.topology}"],
            "config": self._config(case).read_text(encoding="utf-8"),
            "versions": launch.versions(),
        }

    def _config(self, case: Case) -> Path:
        return self.configs / f"{case.config}.gin"

    def _arguments(self, case: Case) -> list[str]:
        bindings = [f"--gin_bindings={binding}" for binding in case.bindings]
        return [f"--gin_file={self._config(case)}", *self.arguments, *bindings, *self.bindings]


def reusable(path: Path, identity: Mapping[str, Any], other_code: bool) -> dict[str, Any] | None:
    """The facts in the file, if made from the same; None: the case must be compiled."""
    if not path.is_file():
        return None
    facts = read_json(path, remedy="delete it to compile it again")
    same = facts.get("identity") == identity and facts.get("format") == launch.FORMAT
    return facts if same and (other_code or facts.get("code") == code_digest()) else None


def write(rows: Sequence[Mapping[str, Any]], stem: Path) -> list[Path]:
    """The table and the pictures of all plans."""
    images = pictures.draw(rows, stem)
    parts = [*family_tables(rows), Section("Pictures", pictures.NOTES, (), pictures.as_text(rows))]
    text = json.dumps({"rows": rows}, ensure_ascii=False, indent=1) + "\n"
    verdict = f"{sum('refused' not in row for row in rows)} of {len(rows)} fit their machine"
    title = "The family of the GShard paper, compiled for its TPU v3 pods"
    return [*pages.write(stem, title, verdict, parts, text), *images]


def family_tables(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Memory, traffic, time next to Table 3, and compilation: a row a plan."""
    memory: list[tuple[str, ...]] = [_MEMORY]
    sent: list[tuple[str, ...]] = [_SENT]
    time: list[tuple[str, ...]] = [_TIME]
    made: list[tuple[str, ...]] = [_MADE]
    for facts in rows:
        name = label(facts)
        size = f"{sum(facts['parameters'].values()) / 1e9:,.1f}"
        model = tables.paper_model(facts)
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
        Section("Step time: a model", [*model_notes(topology("v3:8x8")), _OTHER_TOKENS], time),
        *_growth(rows),
        Section("Compiling", ["On two cores; wall time depends on what else runs."], made),
    ]


def _growth(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Section 5.2's figures of the exchange: from 128 to 2,048 cores at equal tokens a core."""
    table: list[tuple[str, ...]] = [_GROWTH]
    for layers in (12, 36):
        pair = {
            facts["devices"]: facts["step_seconds"]
            for facts in rows
            if pictures.equal_tokens(facts)
            and pictures.layers(facts) == layers
            and "step_seconds" in facts
        }
        if not {128, 2048} <= pair.keys():
            continue
        small, large = pair[128], pair[2048]
        sent = [seconds["communication"]["all-to-all"] for seconds in (small, large)]
        shares = [f"{s / all['total']:.0%}" for s, all in zip(sent, (small, large), strict=True)]
        growth = sent[1] / sent[0], large["total"] / small["total"]
        table.append((f"{layers} layers", *shares, *(f"{times:.2f}" for times in growth)))
    if len(table) == 1:
        return []
    table.append(("the paper, section 5.2", "16%", "36%", "3.75", "1.7"))
    notes = ["The paper's are of MoE and Transformer layers; 36 layers are what ours is fitted to."]
    return [Section("Growth from 128 to 2,048 cores", notes, table)]


_GROWTH = (
    "model",
    "all-to-all's share, 128",
    "share, 2,048",
    "all-to-all, times as long",
    "step, times as long",
)
_MEMORY = (
    "model",
    "cores",
    "10^9 parameters",
    "paper",
    "replicated weights",
    "expert weights",
    "optimizer",
    "temporaries",
    "total",
)
_SENT = (
    "model",
    "all-to-all",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
)
_TIME = (
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
_MADE = ("model", "tracing, s", "compiling, s", "CPU, s", "host memory, GiB")


def label(facts: Mapping[str, Any]) -> str:
    """ "(1) MoE(2048E, 36L), bfloat16"."""
    printed = table3.paper_row_of(facts["config"])
    name = printed.model if printed else facts["config"]
    return f"{name}, {facts['label']}" if facts.get("label") else name


def _traffic(facts: Mapping[str, Any], kind: str) -> str:
    total = facts["collectives"].get(kind)
    return "" if total is None else f"{total['count']:,} x, {total['payload_bytes'] / GIB:.2f}"


def _seconds(facts: Mapping[str, Any]) -> list[str]:
    seconds, cost = facts["step_seconds"], tables.costs(facts)
    if cost is None:
        return [""] * (len(_TIME) - 1)
    exchange = seconds["communication"].get("all-to-all", 0.0)
    other = sum(seconds["communication"].values()) - exchange
    found = [
        f"{facts['flops']['traced'] / 1e12:.1f}",
        *(f"{n:.3f}" for n in (seconds["compute"], exchange, other, seconds["total"])),
    ]
    compare = tables.paper_step(facts)
    paper = compare.steps_per_second if compare else None
    if paper:
        found += [f"{1 / float(paper):.3f}", f"{seconds['total'] * float(paper):.2f}"]
    else:
        found += ["", ""]
    days, years = (compare.days, compare.core_years) if compare else (None, None)
    return [*found, f"{cost['days']:.1f}", days or "", f"{cost['device_years']:.1f}", years or ""]
