"""Measures seconds and tokens/s of a training step; prints JSON lines.

    python benchmarks/train_step.py --width 128 --experts 8 --vocab 3072 --rows 22 --length 64
    python benchmarks/train_step.py --models 4 --vs "--models 1"     # one vmapped program of four

With --vs the steps of two settings are interleaved, so that a machine whose speed drifts
slows both; the last line is the ratio of their medians of tokens/s. `kept` is the share of choices
that have a slot, `expert_usage` that of slots which are filled: m4 computes all of them, or with
--dropless the blocks that there are. `limit_seconds` is what the matrix products alone would take
at the machine's fastest.
"""

import argparse
import dataclasses
import functools
import json
import resource
import shlex
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from balanced import ROUTER, preferences
from interleaved import interleaved_steps
from process import device

from m4.model.dispatch.einsum import einsum
from m4.model.dispatch.gather import gather
from m4.model.flops import forward_flops, model_flops
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.moe import MoeLayer
from m4.model.routing import Capacity, Routing, Tokens
from m4.model.transformer import Transformer
from m4.parallel.mesh import make_mesh
from m4.parallel.platform.hardware import restart_with_huge_pages
from m4.train.measuring.step_clock import peak_flops
from m4.train.optimizer import adafactor, adamw, muon
from m4.train.program import initialize, train_program
from m4.train.training import Training

DISPATCH = {"einsum": einsum, "gather": gather}
OPTIMIZERS = {
    "adamw": adamw,
    "adamw_experts_every_4": functools.partial(adamw, experts_every=4),  # as in `mean`
    "adafactor": adafactor,
    "muon": muon,
    "muon_without_experts": functools.partial(muon, experts=False),
}
# Metrics shown from the last step.
_ROUTING = ("expert_usage", "first_overflow", "second_dropped")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in {
        "width": 64,
        "heads": 2,
        "head_width": 32,
        "mlp_width": 256,
        "layers": 2,
        "experts": 0,
        "group_tokens": 0,
        "vocab": 1000,
        "rows": 8,
        "length": 64,
        "models": 1,
        "directions": 0,  # directions whose choices the MoE layers count; 0 means no counts
        "steps": 20,
    }.items():
        result.add_argument(f"--{name}", type=int, default=default)
    result.add_argument("--dropout", type=float, default=0.0)
    result.add_argument("--capacity_factor", type=float, default=1.25)
    result.add_argument("--dropless", action="store_true", help="no capacity, in blocks")
    result.add_argument("--balanced", action="store_true", help="routing, and all second choices")
    result.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    result.add_argument("--dispatch", choices=DISPATCH, default="gather")
    result.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    result.add_argument("--vs", default=None, help="other settings, interleaved with these")
    return result


def balanced(tokens: Tokens, num_experts: int, capacity: Capacity) -> Routing:
    """top2_gshard by `preferences`, with every second choice."""
    preferred_GSE = preferences(tokens.mask_GS.size, num_experts)
    preferred_GSE = preferred_GSE.reshape(*tokens.mask_GS.shape, num_experts)

    def score(name: str, **options) -> jax.Array:
        return ROUTER * tokens.score(name, **options) + preferred_GSE

    balanced_tokens = dataclasses.replace(tokens, score=score)
    return top2_gshard(balanced_tokens, num_experts, capacity, second_policy="all")


class Setting:
    """A compiled step with its state and batch; `run` makes one step and returns its seconds."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        moe = functools.partial(
            MoeLayer,
            num_experts=args.experts,
            group_tokens=args.group_tokens,
            train_capacity_factor=None if args.dropless else args.capacity_factor,
            dispatch=DISPATCH[args.dispatch],
            **({"gate": balanced} if args.balanced else {}),
        )
        model = Transformer(
            vocab_size=args.vocab,
            width=args.width,
            heads=args.heads,
            head_width=args.head_width,
            mlp_width=args.mlp_width,
            encoder_layers=args.layers,
            decoder_layers=args.layers,
            moe=moe if args.experts else None,
            dropout_rate=args.dropout,
            directions=args.directions,
            dtype=jnp.dtype(args.dtype),
        )
        training = Training(1000, args.rows, OPTIMIZERS[args.optimizer])
        directions = [f"en-{i}" for i in range(max(args.directions, 2))]
        program = train_program(training, model, directions, make_mesh())
        step, init = program.step, functools.partial(initialize, model, program.optimizer)
        lead = ()
        if args.models > 1:
            lead, step, init = (args.models,), jax.vmap(step), jax.vmap(init)
        self.state = jax.jit(init)(jnp.arange(args.models) if lead else 0)
        self.parameters = (
            sum(leaf.size for leaf in jax.tree.leaves(self.state.params)) // args.models
        )
        random = np.random.default_rng(0)
        shape = (*lead, args.rows, args.length)
        # Five packed pairs per row without padding; real rows are about 90% full.
        segments = np.broadcast_to(np.arange(args.length) * 5 // args.length + 1, shape)
        tokens = {
            name: random.integers(3, args.vocab, shape, dtype=np.int32)
            for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
        }
        self.batch = {
            **tokens,
            "decoder_loss_weights": np.ones(shape, np.float32),
            "encoder_segment_ids": segments.astype(np.int32),
            "decoder_segment_ids": segments.astype(np.int32),
            "direction_ids": (segments * 7 % max(args.directions, 1)).astype(np.int32),
        }
        self.batch["encoder_direction_ids"] = self.batch["direction_ids"]
        self.cpu_seconds: list[float] = []  # of all threads: other work on the machine counts less
        self.flops = args.models * model_flops(
            forward_flops(model, args.rows, args.length, args.length)
        )
        self.peaks: list[float] = []
        self.step = jax.jit(step, donate_argnums=0)
        start = time.perf_counter()
        self.run()
        self.compile_seconds = time.perf_counter() - start
        self.run()
        self.seconds: list[float] = []

    def run(self) -> float:
        start, cpu = time.perf_counter(), time.process_time()
        self.state, self.metrics = self.step(self.state, self.batch)
        jax.block_until_ready(self.metrics)
        self.cpu_seconds.append(time.process_time() - cpu)
        return time.perf_counter() - start

    def measure_peak(self) -> None:
        self.peaks.extend(peak_flops(jax.devices(), self.args.dtype) for _ in range(3))

    def row(self) -> dict:
        """Returns the medians of the timed steps; tokens count source and target."""
        seconds = statistics.median(self.seconds)
        tokens = 2 * self.args.rows * self.args.length * self.args.models
        settings = {name: value for name, value in vars(self.args).items() if name != "vs"}
        found = {name: np.mean(value) for name, value in self.metrics.items() if name in _ROUTING}
        if found:
            dropped = found["first_overflow"] + found["second_dropped"]
            settings["kept"] = round(float(1 - dropped / 2), 4)
            settings["expert_usage"] = round(float(found["expert_usage"]), 4)
        return {
            **settings,
            "parameters": self.parameters,
            "seconds": round(seconds, 5),
            "mean": round(statistics.mean(self.seconds), 5),
            "fastest": round(min(self.seconds), 5),
            "limit_seconds": round(self.flops / max(self.peaks), 5),
            "cpu_seconds": round(statistics.median(self.cpu_seconds[-len(self.seconds) :]), 5),
            "tokens_per_second": round(tokens / seconds),
            "compile_seconds": round(self.compile_seconds, 1),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            **device(),
        }


def main() -> None:
    args = parser().parse_args()
    settings = [Setting(args)]
    if args.vs is not None:
        # Options that --vs does not name are as in the first setting.
        settings.append(
            Setting(
                parser().parse_args(
                    shlex.split(args.vs), argparse.Namespace(**{**vars(args), "vs": None})
                )
            )
        )
    for _ in interleaved_steps(args.steps, lambda: [one.measure_peak() for one in settings]):
        for setting in settings:
            setting.seconds.append(setting.run())
    rows = [setting.row() for setting in settings]
    for row in rows:
        print(json.dumps(row))
    if len(rows) == 2:
        ratio = rows[0]["tokens_per_second"] / rows[1]["tokens_per_second"]
        print(json.dumps({"ratio_tokens_per_second": round(ratio, 3)}))


if __name__ == "__main__":
    restart_with_huge_pages()  # as `m4` does
    main()
