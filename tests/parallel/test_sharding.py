"""GShard's annotations: who holds what, inside and outside of programs, and what is refused."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from m4.parallel.sharding import _grid, mesh_split, partial_tile, replicate, shard, split, tile

SCATTERED = [3, 1, 2, 0, 7, 6, 5, 4]  # not a grid with its axes exchanged


def array(*sizes: int) -> jax.Array:
    return jnp.arange(np.prod(sizes), dtype=jnp.float32).reshape(sizes)


def abstract(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def part(x: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
    assert x.sharding is not None
    return x.sharding.shard_shape(x.shape)


def assert_parts(x: jax.Array, original: jax.Array, ids: np.ndarray, mapping: list[int]) -> None:
    """Compares each device's part with the definition's, slowly."""
    found = {piece.device.id: np.asarray(piece.data) for piece in x.addressable_shards}
    assert set(found) == set(ids.flat)
    for place in np.ndindex(ids.shape):
        own = np.asarray(original)
        for dimension, over in enumerate(mapping):
            if over != -1:
                own = np.split(own, ids.shape[over], axis=dimension)[place[over]]
        np.testing.assert_array_equal(found[int(ids[place])], own)


def in_program(annotation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns a compiled program that makes a value and annotates it."""
    return jax.jit(lambda x: annotation(x * 1.0))


def test_the_papers_example() -> None:
    # On 8 devices: 256 / 2, 1024, 8192 / 4. Only its shape exists.
    ids = np.arange(8).reshape(2, 1, 4)
    assert part(shard(abstract(256, 1024, 8192), ids)) == (128, 1024, 2048)
    assert part(shard(abstract(3, 16, 64), ids.reshape(1, 2, 4))) == (3, 8, 16)
    assert part(split(abstract(256, 1024), 0, 8)) == (32, 1024)
    assert part(replicate(abstract(256, 1024))) == (256, 1024)


def test_the_papers_dense_weights() -> None:
    mesh = np.arange(8).reshape(4, 2)
    # Attention [heads, depth, width]: width over 4, heads over 2. Feed-forward [width, hidden].
    assert part(mesh_split(abstract(16, 128, 64), mesh, [1, -1, 0])) == (8, 128, 16)
    assert part(mesh_split(abstract(64, 256), mesh, [0, 1])) == (16, 128)
    weights = array(4, 3, 8)
    assert_parts(mesh_split(weights, mesh, [1, -1, 0]), weights, mesh, [1, -1, 0])


@pytest.mark.parametrize("place", [lambda f: f, in_program], ids=["outside", "in_program"])
@pytest.mark.parametrize(
    "ids",
    [
        np.arange(8).reshape(2, 4),
        np.arange(8).reshape(4, 2).T,
        np.arange(8).reshape(2, 2, 2).transpose(2, 0, 1).reshape(2, 4),
        np.array(SCATTERED).reshape(2, 4),
    ],
)
def test_every_device_has_its_part(place: Callable, ids: np.ndarray) -> None:
    x = array(4, 8)
    assert_parts(place(lambda x: shard(x, ids))(x), x, ids, [0, 1])
    assert_parts(place(lambda x: tile(x, ids))(x), x, ids, [0, 1])
    assert_parts(place(lambda x: mesh_split(x, ids, [1, 0]))(x), x, ids, [1, 0])
    assert_parts(place(lambda x: mesh_split(x, ids, [-1, 0]))(x), x, ids, [-1, 0])
    # Copies along the last dimension of the ids.
    row = array(4)
    assert_parts(place(lambda x: partial_tile(x, ids))(row), row, ids, [0])
    assert_parts(place(lambda x: mesh_split(x, ids, [0]))(row), row, ids, [0])
    assert_parts(place(lambda x: split(x, -1, 4))(x), x, np.arange(8).reshape(4, 2), [-1, 0])
    assert_parts(place(lambda x: split(x, 0, 1))(x), x, np.arange(8), [-1, -1])
    assert_parts(place(replicate)(x), x, np.arange(8), [-1, -1])


@pytest.mark.parametrize("shape", [(2, 3, 2), (6, 2), (12,), (5,), (1,), (2, 2, 3)])
def test_grid_equals_its_assignment(shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    random = np.random.default_rng(0)
    transposed = [np.arange(count).reshape(shape).transpose(t) for t in permutations(shape)]
    flattened = [ids.reshape(count) for ids in transposed]
    for ids in [*transposed, *flattened, random.permutation(count).reshape(shape)]:
        grid = _grid(ids)
        laid_out = np.array(grid.order).reshape(grid.sizes)
        outermost_first = [axis for axes in grid.axes for axis in axes]
        np.testing.assert_array_equal(laid_out.transpose(outermost_first).reshape(ids.shape), ids)
    for ids in [*transposed, *flattened]:
        assert _grid(ids).order == list(range(count))


def permutations(shape: tuple[int, ...]) -> itertools.permutations:
    return itertools.permutations(range(len(shape)))


def test_one_program_takes_all_orders_that_are_grids() -> None:
    crossed = np.arange(8).reshape(2, 4).T

    @jax.jit
    def function(x):
        x = split(x * 1.0, 0, 8)
        x = shard(x + 1.0, crossed)
        y = partial_tile(x, np.arange(8).reshape(4, 1, 2))
        return x, y

    x = array(8, 8)
    y, z = function(x)
    assert_parts(y, x + 1.0, crossed, [0, 1])
    assert_parts(z, x + 1.0, np.arange(8).reshape(4, 1, 2), [0, 1])


def test_one_program_takes_one_order_that_is_no_grid() -> None:
    x = array(8, 8)

    def both(x, devices=None):
        return shard(split(x * 1.0, 0, 8) + 1.0, np.array(SCATTERED).reshape(2, 4), devices=devices)

    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(both)(x)
    # Arguments count as well.
    with pytest.raises(ValueError, match="incompatible devices"):
        in_program(lambda x: shard(x, np.array(SCATTERED)[:, None]))(split(x, 0, 8))
    # As the order of the program, for all of its annotations, it is fine.
    order = [jax.devices()[i] for i in SCATTERED]
    assert_parts(
        jax.jit(lambda x: split(x * 1.0, 0, 8, devices=order))(x), x, np.array(SCATTERED), [0, -1]
    )


def test_some_of_the_devices() -> None:
    ids, named = np.array([[1, 0], [3, 2]]), np.array([[5, 4], [7, 6]])  # named: their own ids
    for place in (lambda f: f, in_program):
        found = place(lambda x: shard(x, ids, devices=jax.devices()[4:]))(array(4, 8))
        assert_parts(found, array(4, 8), named, [0, 1])


def test_mesh_of_jax() -> None:
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = mesh_split(array(4, 8), mesh, [1, -1])
    assert x.sharding == NamedSharding(mesh, PartitionSpec("model", None))
    with jax.set_mesh(mesh):
        y = in_program(lambda x: mesh_split(x, mesh, [0, 1]))(x)
    assert_parts(y, array(4, 8), np.arange(8).reshape(2, 4), [0, 1])


def test_gradients_go_through_and_nothing_is_sent_for_rows() -> None:
    x = array(8, 2)
    gradient = jax.jit(jax.grad(lambda x: (split(x, 0, 8) ** 2).sum()))(x)
    np.testing.assert_array_equal(gradient, 2 * x)
    # Table 4: rows of the left side split, the right side whole.
    y = jax.jit(jnp.matmul)(split(array(16, 8), 0, 8), replicate(array(8, 4)))
    assert part(y) == (2, 4)
    np.testing.assert_allclose(y, array(16, 8) @ array(8, 4), rtol=1e-6)


ALL, MESH = np.arange(8), Mesh(np.array(jax.devices()), "x")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda: split(abstract(3, 10), 1, 4),
            r"sharding.split: dimension 1 of an array \[3, 10\] does not divide into 4 parts; "
            "nearest valid sizes: 8 and 12",
        ),
        (lambda: split(abstract(6), 0, 3), "3 partitions of 8 devices; it can be 1, 2, 4, 8"),
        (lambda: split(abstract(8), 1, 8), "dimension 1 of an array with 1 dimensions"),
        (lambda: shard(abstract(8), ALL.reshape(2, 4)), r"an array \[8\]: it needs as many dim"),
        (lambda: partial_tile(abstract(8), ALL), "as many dimensions and one more"),
        (lambda: tile(abstract(8), ALL[:4]), r"ids \[0, 1, 2, 3\]: each of 0 \.\.\. 7"),
        (lambda: replicate(abstract(2), devices=[]), "devices must be at least one"),
        (lambda: mesh_split(abstract(8, 8), [[0, 1]], [0]), r"has 1 entries, the array \[8, 8\]"),
        (lambda: mesh_split(abstract(8), ALL, [1]), "one of the mesh's dimensions, 0,"),
        (lambda: mesh_split(abstract(8), MESH, [0], devices=jax.devices()), "leave devices out"),
    ],
)
def test_invalid_annotations_are_refused(function: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        function()
    assert "\n" not in str(error.value)


def test_explicit_and_manual_axes_are_refused() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="all its axes must be Auto"):
        mesh_split(abstract(8), mesh, [0])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"use jax\.sharding\.reshard"):
        jax.eval_shape(lambda x: split(x, 0, 8), abstract(8))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("x")
    body = jax.shard_map(lambda x: split(x, 0, 8), mesh=mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(ValueError, match="an array is local"):
        jax.eval_shape(body, abstract(64))
