"""Measures a training step whose gradients are altered by set of directions; prints JSON lines.

    python benchmarks/gradients.py --steps 20
    python benchmarks/gradients.py --width 256 --experts 8 --groups 2 4 8

Steps of all settings are interleaved, so that a machine whose speed drifts slows all of them.
`temporary_mb` is what the compiled program needs in addition to its arguments (XLA's analysis),
`ratio` the median over rounds of the step's seconds over the plain step's.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import numpy as np
from process import device

from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.parallel.mesh import make_mesh
from m4.train.multitask.groups import Listed
from m4.train.multitask.surgery import GradientVaccine, PCGrad
from m4.train.optimizer import adamw
from m4.train.program import train_program
from m4.train.training import Training

SURGERY = {"PCGrad": PCGrad, "GradientVaccine": GradientVaccine}


class Setting:
    """A compiled step with its state and batch."""

    def __init__(self, args: argparse.Namespace, name: str, groups: int):
        self.name, self.groups, self.seconds = name, groups, []
        names = [f"en-x{i}" for i in range(max(*args.groups, 2))]
        cut = np.array_split(names, max(groups, 1))
        listed = Listed({f"group {i}": [*map(str, one)] for i, one in enumerate(cut)})
        surgery = SURGERY[name](groups=listed) if groups else None
        training = Training(1000, args.rows, adamw, gradients=surgery)
        moe = functools.partial(MoeLayer, num_experts=args.experts, group_tokens=0)
        model = Transformer(
            vocab_size=args.vocab,
            width=args.width,
            heads=args.width // 32,
            head_width=32,
            mlp_width=4 * args.width,
            encoder_layers=args.layers,
            decoder_layers=args.layers,
            moe=moe if args.experts else None,
            dropout_rate=0.0,
        )
        program = train_program(training, model, names, make_mesh())
        with program.axis_rules():
            self.state = program.new_state()
            self.batch = batch_of(args, len(names))
            self.step = program.jit().lower(self.state, self.batch).compile()
        analysis = self.step.memory_analysis()
        self.temporary_mb = round(analysis.temp_size_in_bytes / 2**20)
        self.parameters = sum(x.size for x in jax.tree.leaves(self.state.params))

    def run(self) -> float:
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - start


def batch_of(args: argparse.Namespace, directions: int) -> dict[str, np.ndarray]:
    """Returns rows of five packed pairs in random directions."""
    random = np.random.default_rng(0)
    shape = (args.rows, args.length)
    segments = np.broadcast_to(np.arange(args.length) * 5 // args.length + 1, shape)
    ids = (segments + np.arange(args.rows)[:, None]) % directions
    kinds = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    return {
        **{name: random.integers(3, args.vocab, shape, dtype=np.int32) for name in kinds},
        "decoder_loss_weights": np.ones(shape, np.float32),
        "encoder_segment_ids": segments.astype(np.int32),
        "decoder_segment_ids": segments.astype(np.int32),
        "direction_ids": ids.astype(np.int32),
        "encoder_direction_ids": ids.astype(np.int32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    sizes = {"width": 128, "layers": 2, "experts": 8, "vocab": 3072, "rows": 22, "length": 64}
    for name, default in {**sizes, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    settings = [Setting(args, "plain", 0)]
    settings += [Setting(args, name, groups) for name in SURGERY for groups in args.groups]
    for one in settings:
        one.run()
    for _ in range(args.steps):
        for one in settings:
            one.seconds.append(one.run())
    for one in settings:
        pairs = zip(one.seconds, settings[0].seconds, strict=True)
        row = {
            "gradients": one.name,
            "groups": one.groups,
            "parameters": one.parameters,
            "seconds": round(statistics.median(one.seconds), 4),
            "ratio": round(statistics.median(mine / plain for mine, plain in pairs), 2),
            "temporary_mb": one.temporary_mb,
        }
        print(json.dumps({**row, **device()}), flush=True)


if __name__ == "__main__":
    main()
