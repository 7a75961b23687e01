"""Prints a table of CPU milliseconds of a training step by part of the model.

    taskset -c 0 python benchmarks/profile_step.py --width 256 --experts 8

It takes the settings of train_step.py, and traces --steps steps with JAX's profiler. XLA names each
operation that it runs by the function that it comes from. On one core the parts add up to the
step; with more of them the profiler does not see all of the threads' work.
"""

import collections
import os
import re
import sys
import tempfile
from pathlib import Path

import jax
from train_step import Setting, parser

from m4.parallel.platform.hardware import restart_with_huge_pages

INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', re.MULTILINE)
# The first one found in an operation's name decides its part.
PARTS = {
    "logits and loss": r"attend|jvp\(\)",
    "experts, gate and dispatch": r"moe",
    "feed-forward": r"/mlp/",
    "norms": r"norm",
    "attention: products of the projections": r"attention/(\.\.\.SM|dot_general)",
    "attention: the rest": r"attention",
    "embedding and bias": r"embed|bias",
    "optimizer": r"^jit\(train_step\)/[^/]*$",
    "other": r"",
}


def main() -> None:
    args = parser().parse_args()
    if len(os.sched_getaffinity(0)) > 1:
        sys.exit("profile_step.py: pin it to one core, such as with `taskset -c 0`")
    setting = Setting(args)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(args.steps):
                setting.run()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
        events = [event for plane in planes for line in plane.lines for event in line.events]
        ran = [(event.name, event.duration_ns) for event in events]
    program = setting.step.lower(setting.state, setting.batch).compile().as_text() or ""
    names = dict(INSTRUCTION.findall(program))
    spent: collections.Counter[tuple[str, str]] = collections.Counter()
    for operation, nanoseconds in ran:
        if operation in names:
            name = names[operation]
            part = next(part for part, found in PARTS.items() if re.search(found, name))
            product = name.endswith("dot_general")
            kind = "other" if not product else "backward" if "transpose(jvp" in name else "forward"
            spent[part, kind] += nanoseconds / 1e6 / args.steps
    whole = sum(spent.values())
    print("| part | products, forward | products, backward | other work | share |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for part in PARTS:
        of_part = [spent[part, kind] for kind in ("forward", "backward", "other")]
        print(f"| {part} |", *(f"{ms:.1f} |" for ms in of_part), f"{sum(of_part) / whole:.0%} |")
    print(f"{whole:.0f} ms")


if __name__ == "__main__":
    restart_with_huge_pages()  # as `m4` does
    main()
