"""Trains the demo's model under every strategy of gin_configs/strategies: losses and a picture.

    python benchmarks/strategies.py --folder runs/strategies --output strategies.json \
        --picture docs/images/strategies.png

Each config runs as `m4 train` on 8 fake CPU devices, then the models that differ on one device
(same config; one device, nothing split). JSON: losses at every step that was logged, the largest
difference to the one device, tokens a second, and what the compiled step sends and holds; a table
of the latter. A run that is there is kept. All runs share one corpus. Tokens a second of
fake devices compare nothing: eight take turns on the machine's cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import jax

from m4.config import load
from m4.parallel.platform.jax_setup import use_fake_devices
from m4.plan import hlo
from m4.plan.program import bytes_by_kind, given_bytes, kept_bytes, train_program
from m4.storage.files import write_text
from m4.storage.metrics_log import read_metrics

CONFIGS = Path(__file__).parents[1] / "gin_configs" / "strategies"
DEVICES = 8
HERE = "losses_of_one_device"

# Bindings that make a config one for a single device.
ALONE = [
    *(
        f"--gin.mesh.make_mesh.{axis}=1"
        for axis in ("stage", "data", "fsdp", "node", "expert", "model")
    ),
    "--gin.experiment.Training.fsdp_axes=()",
    "--gin.experiment.Training.extra_axis_rules=()",
    "--gin.experiment.Training.grad_accum_steps=1",
    "--gin.transformer.Transformer.pipeline_microbatches=0",
    "--gin.transformer.Transformer.remat='none'",
]
# Configs whose model on one device is that of another config.
SAME_AS = {
    "accumulation": "data_parallel",
    "expert_data_model": "data_parallel",
    "expert_parallel": "data_parallel",
    "hybrid": "data_parallel",
    "rematerialisation": "data_parallel",
    "sequence": "data_parallel",
    "tensor_parallel": "data_parallel",
    "zero": "data_parallel",
    "two_dimensional": "pipeline",
}


def main() -> None:
    arguments = parser().parse_args()
    names = arguments.only or sorted(path.stem for path in CONFIGS.glob("*.gin"))
    use_fake_devices(DEVICES)
    rows = []
    for name in names:
        if arguments.collectives:
            rows.append({"strategy": name, **measured(name)})
            continue
        one = SAME_AS.get(name, name)
        there = run(arguments.folder, name, DEVICES, arguments.steps)
        here = run(arguments.folder, one, 1, arguments.steps)
        off = max(abs(a - b) / abs(b) for a, b in zip(there["losses"], here["losses"], strict=True))
        rows.append({"strategy": name, "one_device": one, "largest_difference": off, **there})
        rows[-1][HERE] = here["losses"]
        rows[-1] |= measured(name)
        shown = {k: v for k, v in rows[-1].items() if k not in ("losses", "steps", HERE)}
        print(json.dumps(shown), flush=True)
    print(markdown(rows))
    if arguments.output:
        write_text(arguments.output, json.dumps(rows, indent=1) + "\n")
    if arguments.picture and not arguments.collectives:
        draw(rows, arguments.picture)


def run(folder: Path, name: str, devices: int, steps: int) -> dict:
    """Runs `m4 train` on a config; returns a summary of its metrics."""
    at = folder / f"{name}.{devices}"
    if not (at / "checkpoints" / str(steps)).is_dir():
        shared = folder / "data"
        if shared.is_dir() and not at.exists():
            shutil.copytree(shared, at / "data")
            # A run's folder has this; the job writes its own.
            shutil.copy(folder / "run.json", at)
        flags = f"--xla_force_host_platform_device_count={devices}"
        command = [sys.executable, "-m", "m4", "train", f"--gin_file={CONFIGS / name}.gin"]
        command += [f"--model_dir={at}", f"--gin.TRAIN_STEPS={steps}"]
        command += ALONE if devices == 1 else []
        print(" ".join(command), file=sys.stderr, flush=True)
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        if not shared.is_dir():
            shutil.copytree(at / "data", shared)
            shutil.copy(at / "run.json", folder)
    logged = [row for row in read_metrics(at) if "loss" in row]
    # The first row includes the compilation.
    speeds = [row["tokens_per_second"] for row in logged[1:] if "tokens_per_second" in row]
    return {
        "steps": [row["step"] for row in logged],
        "losses": [row["loss"] for row in logged],
        "tokens_per_second": round(statistics.median(speeds)) if speeds else None,
    }


def measured(name: str) -> dict:
    """Returns the collectives and memory per device of a config's compiled training step."""
    program = train_program(load([CONFIGS / f"{name}.gin"]).experiment(), jax.devices(), 10)
    compiled = program.lowered.compile()
    found = hlo.summary(hlo.collectives(compiled.as_text() or ""))
    given = given_bytes(program.params, program.optimizer)
    stats = compiled.memory_analysis()
    return {
        "collectives": {kind: total._asdict() for kind, total in found.items()},
        "memory_bytes": bytes_by_kind(given, stats, kept_bytes(program)),
    }


def markdown(rows: list[dict]) -> str:
    """Returns the table of docs/parallelism.md, in MiB per device."""
    lines = ["| strategy | collectives of a step | MiB sent | weights | optimizer | temporaries |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        kinds = ", ".join(f"{c['count']} {kind}" for kind, c in row["collectives"].items())
        sent = sum(c["sent_bytes"] for c in row["collectives"].values())
        held = row["memory_bytes"]
        weights = held["replicated weights"] + held["expert weights"]
        sizes = (sent, weights, held["optimizer state"], held["temporaries"])
        numbers = " | ".join(f"{size / 2**20:.1f}" for size in sizes)
        lines.append(f"| `{row['strategy']}` | {kinds} | {numbers} |")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Draws losses over each other, and below their differences from one device."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 8), height_ratios=[3, 2], sharex=True, layout="constrained"
    )
    colors = plt.get_cmap("tab20").colors  # pyright: ignore[reportAttributeAccessIssue]
    for i, row in enumerate(rows):
        name, steps = row["strategy"].replace("_", " "), row["steps"]
        # Each is thinner than the one below it, so that equal curves stay visible.
        width = 1.0 + 7.0 * (len(rows) - 1 - i) / max(1, len(rows) - 1)
        top.plot(steps, row["losses"], color=colors[i], linewidth=width, label=name)
        pairs = zip(row["losses"], row[HERE], strict=True)
        off = [max(abs(a - b) / abs(b), 1e-9) for a, b in pairs]
        bottom.plot(steps, off, color=colors[i], label=name)
    top.set_ylabel("training loss")
    top.set_title("The demo's model on eight devices, by strategy")
    top.legend(fontsize=8, ncols=2)
    bottom.set_yscale("log")
    bottom.set_ylabel("relative difference\nto one device")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    top.grid(alpha=0.3)
    partial = path.with_name(f".{path.name}.part.png")
    figure.savefig(partial, dpi=110)
    partial.replace(path)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--folder", type=Path, default=Path("runs/strategies"), help="of the runs")
    result.add_argument("--collectives", action="store_true", help="print only the table")
    result.add_argument("--steps", type=int, default=100)
    result.add_argument("--only", nargs="*", help="configs to run, by name")
    result.add_argument("--output", type=Path, help="JSON")
    result.add_argument("--picture", type=Path, help="PNG")
    return result


if __name__ == "__main__":
    main()
