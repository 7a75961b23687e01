"""GFLOP/s of the ways to write a matrix product and its gradients; JSON lines.

    python benchmarks/products.py --rows 1024 --K 1024 --N 256
    python benchmarks/products.py --experts 64 --rows 128 --K 1024 --N 4096

Of y = x w with x [(E,) rows, K], w [(E,) K, N]: y, dx = dy w^T and dw = x^T dy, float32. `m4` is
the way that `m4/model/product.py` takes. All ways are interleaved, so that a machine whose speed
drifts slows all of them.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp

from m4.model.product import input_gradient, product, weight_gradient
from m4.parallel.platform.hardware import restart_with_huge_pages

kept = jax.lax.optimization_barrier  # XLA does not fold these into a product


def turned(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def ours(x: jax.Array, w: jax.Array) -> jax.Array:
    return product(x, w) if x.ndim == 2 else product(x[:, None], w)[:, 0]


def wider(x: jax.Array, w: jax.Array, d: jax.Array) -> jax.Array:
    x = kept(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 16)]))
    return jnp.einsum("...RK,...RN->...KN", x, d)[..., : w.shape[-2], :]


# (x, w, dy) -> y, dx or dw.
WAYS = {
    "y: x w": lambda x, w, d: x @ w,
    "y: x^T written down": lambda x, w, d: jnp.einsum("...KR,...KN->...RN", kept(turned(x)), w),
    "y: m4": lambda x, w, d: ours(x, w),
    "dx: dy w^T": lambda x, w, d: jnp.einsum("...RN,...KN->...RK", d, w),
    "dx: (w dy^T)^T": lambda x, w, d: turned(kept(jnp.einsum("...KN,...RN->...KR", w, d))),
    "dx: m4": lambda x, w, d: input_gradient(d, w),
    "dw: differentiation's": lambda x, w, d: jax.vjp(lambda w: x @ w, w)[1](d)[0],
    "dw: x^T dy": lambda x, w, d: jnp.einsum("...RK,...RN->...KN", x, d),
    "dw: x^T written down": lambda x, w, d: kept(turned(x)) @ d,
    "dw: x^T dy, x 16 wider": wider,
    "dw: m4": lambda x, w, d: weight_gradient(x, d),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--experts", type=int, default=0, help="0: one product")
    for name, default in {"rows": 1024, "K": 256, "N": 1024, "times": 25}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    experts = (args.experts,) if args.experts else ()
    shapes = [(args.rows, args.K), (args.K, args.N), (args.rows, args.N)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(k, experts + s) for k, s in zip(keys, shapes, strict=True)]
    functions = {name: jax.jit(way) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(args.times + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arrays))
            if turn:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
    work = 2 * max(args.experts, 1) * args.rows * args.K * args.N
    for name, each in seconds.items():
        median = statistics.median(each)
        found = {"seconds": median, "fastest": min(each), "gflops": round(work / median / 1e9, 1)}
        print(json.dumps({**vars(args), "way": name, **found}), flush=True)


if __name__ == "__main__":
    restart_with_huge_pages()
    main()
