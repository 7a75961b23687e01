"""A 3-D convolution network split over space: `python examples/spatial_partitioning.py`.

The images of a 3-D U-Net are too large for one device, and a batch too small to be split. So space
is split: device i has the i-th slab of every image. The network has no annotation; its input is
split and its kernels are replicated (`split` and `replicate` in `main`). XLA's partitioner
propagates the split through every layer, down to the coarse scale and up again, and exchanges what
a kernel needs of the neighbours' slabs, the halo, by collective-permute (GShard, arXiv 2006.16668,
sections 3.3.2 and A.3).

The program runs on fake CPU devices and on one device, prints its collectives, and checks that the
results are equal. The halo of a 3 x 3 x 3 kernel is one layer on either side, with stride 2 on one.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from m4.parallel.platform.jax_setup import use_fake_devices
from m4.parallel.sharding import replicate, split
from m4.plan.hlo import Collective, collectives, summary

Kernels = dict[str, jax.Array]
LAYOUT = ("NDHWC", "DHWIO", "NDHWC")  # batch, depth, height, width, channels; depth is split


def network(images: jax.Array, kernels: Kernels) -> jax.Array:
    """One step down and up a U-Net: [N, D, H, W, C] -> the same shape. No annotation in it."""
    fine = jax.nn.relu(convolve(images, kernels["in"]))
    coarse = jax.nn.relu(convolve(fine, kernels["down"], stride=2))
    coarse = jax.nn.relu(convolve(coarse, kernels["middle"]))
    for axis in (1, 2, 3):
        coarse = jnp.repeat(coarse, 2, axis)
    return convolve(jnp.concatenate([fine, coarse], -1), kernels["out"])


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """[N, D, H, W, C] with [3, 3, 3, C, C'] -> [N, D/stride, H/stride, W/stride, C']."""
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 3, "SAME", dimension_numbers=LAYOUT)


def make_kernels(channels: int) -> Kernels:
    """Kernels [3, 3, 3, C, C'], drawn so that layers keep the size of their input."""
    inputs = {"in": channels, "down": channels, "middle": channels, "out": 2 * channels}
    keys = jax.random.split(jax.random.key(1), len(inputs))
    return {
        name: jax.random.normal(key, (3, 3, 3, wide, channels)) / (27 * wide) ** 0.5
        for key, (name, wide) in zip(keys, inputs.items(), strict=True)
    }


def loss(kernels: Kernels, images: jax.Array) -> jax.Array:
    """A loss, for its gradient."""
    return ((network(images, kernels) - images) ** 2).mean()


def run(function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[Collective]]:
    """Compiles and runs it: its result, and the collectives of the program."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled(*arguments), collectives(compiled.as_text() or "")


def show(name: str, found: Sequence[Collective], console: Console) -> None:
    """Prints a program's collectives."""
    made = Table("collective", "bytes a device", "name", box=SIMPLE_HEAD, title=name)
    for each in found:
        made.add_row(each.kind, f"{each.payload_bytes:,}", escape(each.name))
    console.print(made)
    for kind, total in summary(found).items():
        console.print(f"{total.count} {kind}: {total.payload_bytes:,} bytes")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the network on one device and split over several, forward and backward; compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="fake CPU devices (8)")
    parser.add_argument("--depth", type=int, default=32, help="of the images, which is split (32)")
    options = parser.parse_args(arguments)
    use_fake_devices(options.devices)
    devices = jax.devices("cpu")[: options.devices]

    images = jax.random.normal(jax.random.key(0), (1, options.depth, 8, 8, 4))
    kernels = make_kernels(channels=4)
    # All annotations. Kernels are small: every device has them.
    split_images = split(images, 1, options.devices, devices=devices)
    replicated = jax.tree.map(lambda kernel: replicate(kernel, devices=devices), kernels)

    console = Console(width=100)
    for name, function, alone, apart in (
        ("forward", network, (images, kernels), (split_images, replicated)),
        ("forward and backward", jax.grad(loss), (kernels, images), (replicated, split_images)),
    ):
        expected, _ = run(function, *alone)
        result, found = run(function, *apart)
        show(f"{name}, {options.devices} devices", found, console)
        errors = jax.tree.map(
            lambda a, b: float(abs(a - jnp.asarray(b)).max()), expected, jax.device_get(result)
        )
        worst = max(jax.tree.leaves(errors))
        print(f"largest difference from one device: {worst:.1e}")
        if worst > 1e-5:
            raise SystemExit("the split program gives another result")


if __name__ == "__main__":
    main()
