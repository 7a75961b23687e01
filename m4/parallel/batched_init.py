"""Programs that draw a new model's weights, made quick to compile.

XLA's options alone do not: without batching, the program of 6 + 6 layers takes 9.3 CPU seconds to
compile instead of 1.5, and a quarter of the arrays get other last bits.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh

# Larger arrays are drawn one by one: a batch of them would need their memory twice.
_LARGEST = 2**20


def draw_together(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with like draws made as one batched draw: the same values, to rounding.

    Each draw from a random key is a separate program to XLA, some hundred instructions long. Draws
    are alike where they are the same operation on arguments of the same shapes, and none needs
    another's result. The function maps arrays to a tree of arrays, in jax.jit.
    """

    def together(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for alike in _in_order(closed.jaxpr):
            inputs = [[read(atom) for atom in equation.invars] for equation in alike]
            if len(alike) == 1:
                outputs = [_call(alike[0], *inputs[0])]
            else:
                stacked = [jnp.stack(each) for each in zip(*inputs, strict=True)]
                drawn = jax.vmap(lambda *xs, one=alike[0]: _call(one, *xs))(*stacked)
                # Else XLA computes the whole batch again for each of its parts.
                drawn = jax.lax.optimization_barrier(drawn)
                outputs = [[each[i] for each in drawn] for i in range(len(alike))]
            for equation, results in zip(alike, outputs, strict=True):
                values |= zip(equation.outvars, results, strict=True)
        leaves = [read(atom) for atom in closed.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return together


def _in_order(jaxpr: Any) -> list[list[Any]]:
    """Orders the equations so that they can be evaluated, with those that are alike together."""
    level: dict[Any, int] = defaultdict(int)
    groups: dict[Any, list[Any]] = defaultdict(list)
    for number, equation in enumerate(jaxpr.eqns):
        atoms = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
        mine = 1 + max((level[atom] for atom in atoms), default=0)
        for var in equation.outvars:
            level[var] = mine
        what: Any = number
        if _is_draw(equation):
            parameters = tuple((name, id(value)) for name, value in equation.params.items())
            shapes = tuple(atom.aval for atom in equation.invars)
            what = (equation.primitive, parameters, shapes)
        groups[mine, what].append(equation)
    return [alike for _, alike in sorted(groups.items(), key=lambda item: item[0][0])]


def _is_draw(equation: Any) -> bool:
    """Tells if it is an operation on a random key whose results are small."""
    key = any(jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key) for atom in equation.invars)
    small = all(var.aval.size <= _LARGEST for var in equation.outvars)
    name = equation.primitive.name
    return key and small and (name == "jit" or name.startswith("random_"))


def unoptimized(mesh: Mesh) -> dict[str, Any]:
    """Returns XLA's options for a program that runs once on these devices."""
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):  # later versions have no such option
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def _call(equation: Any, *inputs: Any) -> list[Any]:
    parameters = equation.primitive.get_bind_params(equation.params)
    outputs = equation.primitive.bind(*inputs, **parameters)
    return list(outputs) if equation.primitive.multiple_results else [outputs]
