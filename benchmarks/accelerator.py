"""Measures m4's step and layer on an accelerator, in float32 and bfloat16: JSON lines and a table.

    python benchmarks/accelerator.py            # minutes on a GPU or a TPU
    python benchmarks/accelerator.py --small    # one case of each kind, on any machine

Each case is a separate process, which frees its memory for the next; a case that does not fit is
a row that says so. The last training case has XLA's deterministic operations
(docs/gpu.md, "The same numbers again").
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DEMO = (
    "train_step.py --width 128 --heads 4 --head_width 32 --mlp_width 512 --layers 2 --experts 8"
    " --vocab 3072 --rows 22 --length 64"
)
BASE = (
    "train_step.py --width 1024 --heads 16 --head_width 64 --mlp_width 4096 --layers 6 --experts 8"
    " --vocab 32000 --rows 64 --length 128 --group_tokens 1024"
)
LAYER = "moe_layer.py --tokens 16384 --experts 64 --group_tokens 1024"
SMALL_LAYER = (
    "moe_layer.py --tokens 4096 --width 128 --mlp_width 512 --experts 64 --group_tokens 4096"
)
CASES = {
    "step of the demo's model": DEMO,
    "step, 6 + 6 layers of 1,024, 8 experts, gather": BASE,
    "the same, einsum": f"{BASE} --dispatch einsum",
    "layer, 64 experts of 4,096, gather": LAYER,
    "the same layer, einsum": f"{LAYER} --dispatch einsum",
    "the same layer, dropless": f"{LAYER} --dispatch dropless",
    "the same layer, ragged": f"{LAYER} --dispatch ragged",
    "layer of 128, 64 experts of 512, gather": SMALL_LAYER,
    "the same small layer, dropless": f"{SMALL_LAYER} --dispatch dropless",
}
SMALL = {
    "step of the demo's model": f"{DEMO} --steps 2",
    "layer, 8 experts": "moe_layer.py --tokens 1024 --width 64 --mlp_width 256 --steps 2",
}
DETERMINISTIC = "--xla_gpu_exclude_nondeterministic_ops=true"


def main() -> None:
    arguments = parser().parse_args()
    rows = []
    for case, command in (SMALL if arguments.small else CASES).items():
        for dtype in arguments.dtype:
            rows.append(run(case, f"{command} --dtype {dtype}"))
    if not arguments.small:
        case = "step, 6 + 6 layers, gather, deterministic"
        rows.append(run(case, f"{BASE} --dtype bfloat16", DETERMINISTIC))
    print(table(rows))


def run(case: str, command: str, flags: str = "") -> dict:
    """Runs a benchmark; prints and returns its last line with the case's name."""
    script, *options = command.split()
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *options],
        env=environment,
        capture_output=True,
        text=True,
    )
    row = {"case": case, "dtype": options[-1]}
    if done.returncode == 0:
        row |= json.loads(done.stdout.splitlines()[-1])
    else:
        row["failed"] = (done.stderr.strip().splitlines() or ["no message"])[-1][:120]
    print(json.dumps(row), flush=True)
    return row


def table(rows: list[dict]) -> str:
    devices = {row["device"] for row in rows if "device" in row}
    lines = [f"{', '.join(sorted(devices))}", ""]
    lines += ["| | | s, median | fastest | tokens/s | GB at most | s to compile |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        cells = [row["case"], row["dtype"]]
        if "failed" in row:
            cells += [row["failed"], "", "", "", ""]
        else:
            memory = row["peak_device_mb"]
            cells += [f"{row['seconds']:.4f}", f"{row['fastest']:.4f}"]
            cells += [f"{row['tokens_per_second']:,}", f"{memory / 1e3:.1f}" if memory else ""]
            cells += [f"{row['compile_seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--small", action="store_true", help="one case of each kind, seconds")
    both = ["float32", "bfloat16"]
    result.add_argument("--dtype", nargs="+", choices=both, default=both)
    return result


if __name__ == "__main__":
    main()
