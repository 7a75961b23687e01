"""Measures one mixture-of-experts layer, forward and backward; prints JSON lines.

    python benchmarks/moe_layer.py --experts 8 --vs "--dispatch einsum"
    python benchmarks/moe_layer.py --experts 64 --gate switch --dtype bfloat16

The default shape is 4,096 tokens of width 1,024 in 8 groups, experts of width 4,096, slots for all
choices when balanced. With --vs the two settings are interleaved, so that a machine whose speed
drifts slows both; the last line is the ratio of their medians. `achieved_gflops` counts the work of
the experts alone, for the choices that are made: 12 * tokens * K * M * F, forward and backward.
"""

import argparse
import functools
import importlib
import json
import pkgutil
import resource
import shlex
import statistics
import time

import jax
import jax.numpy as jnp
from interleaved import interleaved_steps
from process import device

from m4.model import dispatch, gates
from m4.model.moe import MoeLayer
from m4.parallel.platform.hardware import restart_with_huge_pages


def in_folder(package) -> dict:
    """Returns name -> function, for files of a package named like a function in them."""
    made = {}
    for module in pkgutil.iter_modules(package.__path__):
        file = importlib.import_module(f"{package.__name__}.{module.name}")
        if hasattr(file, module.name):
            made[module.name] = getattr(file, module.name)
    return made


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in {
        "tokens": 4096,
        "width": 1024,
        "mlp_width": 4096,
        "experts": 8,
        "group_tokens": 512,
        "steps": 10,
    }.items():
        result.add_argument(f"--{name}", type=int, default=default)
    result.add_argument("--capacity_factor", type=float, default=1.0)
    result.add_argument("--gate", default="top2_gshard", help="a file of m4/model/gates")
    result.add_argument("--dispatch", default="gather", help="a file of m4/model/dispatch")
    result.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    result.add_argument("--forward", action="store_true", help="no backward pass")
    result.add_argument("--vs", default=None, help="other settings, interleaved with these")
    return result


class Setting:
    """A compiled layer with its parameters and tokens; `run` makes one pass, returns seconds."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        layer = MoeLayer(
            args.experts,
            args.mlp_width,
            group_tokens=args.group_tokens,
            train_capacity_factor=args.capacity_factor,
            gate=in_folder(gates)[args.gate],
            dispatch=in_folder(dispatch)[args.dispatch],
            activations=("relu",),
            dropout_rate=0.0,
            vocab_size=1000,
            dtype=jnp.dtype(args.dtype),
        )
        rows = args.tokens // 64
        keys = jax.random.split(jax.random.key(0), 3)
        x_BLM = jax.random.normal(keys[0], (rows, 64, args.width), jnp.dtype(args.dtype))
        ids_BL = jax.random.randint(keys[1], (rows, 64), 0, 1000)
        apply = functools.partial(
            layer.apply,
            mask_BL=jnp.ones((rows, 64), bool),
            ids_BL=ids_BL,
            step=jnp.zeros((), jnp.int32),
            deterministic=False,
            rngs={"dropout": keys[2]},
            mutable=["intermediates"],
        )
        variables = jax.jit(
            lambda x: layer.init(
                {"params": keys[0], "dropout": keys[2]},
                x,
                jnp.ones((rows, 64), bool),
                ids_BL,
                step=jnp.zeros((), jnp.int32),
                deterministic=False,
            )
        )(x_BLM)

        def total(params, x_BLM):
            y_BLM, sown = apply({"params": params}, x_BLM)
            choices = jnp.stack([leaf for leaf in jax.tree.leaves(sown) if leaf.ndim == 0])
            # Every metric is used, so that none is optimised away; the product of y with itself
            # is a loss whose gradient is proportional to y.
            return 0.5 * jnp.vdot(y_BLM, y_BLM).real + 0.0 * jnp.sum(choices)

        function = total if args.forward else jax.grad(total, argnums=(0, 1))
        self.step = jax.jit(function)
        self.inputs = (variables["params"], x_BLM)
        start = time.perf_counter()
        self.run()
        self.compile_seconds = time.perf_counter() - start
        self.run()
        self.seconds: list[float] = []

    def run(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self.step(*self.inputs))
        return time.perf_counter() - start

    def row(self) -> dict:
        seconds = statistics.median(self.seconds)
        settings = {name: value for name, value in vars(self.args).items() if name != "vs"}
        args = self.args
        products = (4 if args.forward else 12) * args.tokens * args.width * args.mlp_width
        # Step 0 is timed, where dense_to_sparse sends every token to every expert.
        one = dict.fromkeys(("switch", "hash", "base"), 1)
        choices = {**one, "dense_to_sparse": args.experts}.get(args.gate, 2)
        return {
            **settings,
            "seconds": round(seconds, 4),
            "fastest": round(min(self.seconds), 4),
            "tokens_per_second": round(args.tokens / seconds),
            "achieved_gflops": round(choices * products / seconds / 1e9),
            "compile_seconds": round(self.compile_seconds, 1),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            **device(),
        }


def main() -> None:
    args = parser().parse_args()
    settings = [Setting(args)]
    if args.vs is not None:
        # Options that --vs does not name are as in the first setting.
        base = argparse.Namespace(**{**vars(args), "vs": None})
        settings.append(Setting(parser().parse_args(shlex.split(args.vs), base)))
    for _ in interleaved_steps(args.steps):
        for setting in settings:
            setting.seconds.append(setting.run())
    rows = [setting.row() for setting in settings]
    for row in rows:
        print(json.dumps(row))
    if len(rows) == 2:
        print(json.dumps({"ratio_seconds": round(rows[0]["seconds"] / rows[1]["seconds"], 3)}))


if __name__ == "__main__":
    restart_with_huge_pages()  # as `m4` does
    main()
