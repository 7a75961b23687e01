"""Rows of processes: each gives those that its devices need, whatever the mesh."""

from typing import Any

import jax
import numpy as np
import pytest

from m4.parallel import mesh as meshes
from m4.parallel.mesh import host_batch, host_rows, host_shards, make_mesh, to_global

BATCH = {
    "tokens": np.arange(32, dtype=np.int32).reshape(16, 2),
    "weights": np.arange(16, dtype=np.float32),
}


def a_batch(step: int, part: meshes.Part) -> dict[str, np.ndarray]:
    number, parts = part
    return {name: np.split(value, parts)[number] + step for name, value in BATCH.items()}


def on(monkeypatch: pytest.MonkeyPatch, mine: set[int]) -> None:
    """Makes this process have the devices of these numbers only."""
    whole = jax.sharding.NamedSharding

    class Mine(whole):
        def addressable_devices_indices_map(self, shape: Any) -> Any:
            everywhere = self.devices_indices_map(shape)
            return {device: at for device, at in everywhere.items() if device.id in mine}

    monkeypatch.setattr(meshes, "NamedSharding", Mine)


def test_rows_are_sharded_over_all_devices_in_order() -> None:
    mesh = make_mesh(expert=2)
    batch = to_global(mesh, BATCH)
    np.testing.assert_array_equal(batch["tokens"], BATCH["tokens"])
    assert batch["weights"].dtype == np.float32
    shards = sorted(batch["tokens"].addressable_shards, key=lambda shard: shard.index[0].start)
    # 16 rows over 8 devices: two each.
    assert [shard.data.shape for shard in shards] == [(2, 2)] * 8


@pytest.mark.parametrize(
    ("sizes", "mine", "parts"),
    [
        # Two processes of four devices: halves.
        ({}, {0, 1, 2, 3}, [(0, 2)]),
        ({}, {4, 5, 6, 7}, [(1, 2)]),
        ({"data": 2, "expert": 4}, {4, 5, 6, 7}, [(1, 2)]),
        # The devices of a model's parts lie together: rows are in two parts, each at four devices.
        ({"data": 2, "model": 4}, {4, 5, 6, 7}, [(1, 2)]),
        # Four processes of two devices, a model over four: processes 2 and 3 give the same rows.
        ({"data": 2, "model": 4}, {4, 5}, [(1, 2)]),
        ({"data": 2, "model": 4}, {6, 7}, [(1, 2)]),
        # Stages are the outermost axis: devices 0-3 and 4-7 hold the same rows.
        ({"stage": 2, "data": 4}, {0, 1, 2, 3}, [(0, 1)]),
        ({"stage": 2, "data": 4}, {4, 5, 6, 7}, [(0, 1)]),
        ({"stage": 2, "data": 4}, {6, 7}, [(1, 2)]),
        # No rows are split: every process gives all.
        ({"data": 1, "model": 8}, {2, 3}, [(0, 1)]),
        # Not neighbours, or not from a multiple on: each part for itself.
        ({}, {0, 2}, [(0, 8), (2, 8)]),
        ({}, {1, 2}, [(1, 8), (2, 8)]),
    ],
)
def test_process_reads_the_rows_of_its_devices(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], mine: set[int], parts: list[meshes.Part]
) -> None:
    mesh = make_mesh(**sizes)
    on(monkeypatch, mine)
    assert host_shards(mesh) == parts
    given = host_batch(a_batch, 0, parts)
    # What it takes from a whole batch is the same.
    for name, value in host_rows(mesh, BATCH).items():
        np.testing.assert_array_equal(given[name], value)


@pytest.mark.parametrize(
    "sizes", [{}, {"data": 2, "model": 4}, {"stage": 2, "data": 2, "expert": 2}]
)
def test_shards_of_all_processes_make_the_batch(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    mesh = make_mesh(**sizes)
    whole = to_global(mesh, BATCH)["tokens"]
    for process in range(4):
        mine = {2 * process, 2 * process + 1}
        with monkeypatch.context() as patch:
            on(patch, mine)
            given = host_batch(a_batch, 0, host_shards(mesh))["tokens"]
        # What its devices hold of the whole, each row once, in order.
        held = {
            shard.index[0].start or 0: np.asarray(shard.data)
            for shard in whole.addressable_shards
            if shard.device.id in mine
        }
        np.testing.assert_array_equal(given, np.concatenate([held[at] for at in sorted(held)]))
