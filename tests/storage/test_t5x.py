"""Checkpoints in T5X's format: what others wrote is read, what m4 writes has their form."""

import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest

from m4.settings import InputError
from m4.storage import t5x
from m4.storage.t5x import T5xCheckpoint
from tests import t5x_files
from tests.damage import damaged_json, refused

ARRAYS = {
    "target/encoder/layers_0/mlp/wo/kernel": np.arange(60, dtype=np.float32).reshape(5, 12) - 7,
    "target/encoder/encoder_norm/scale": np.linspace(0, 1, 12, dtype=np.float32),
    "target/zeros/kernel": np.zeros((4, 512), np.float32),  # a chunk of zeros is a file too
    "state/param_states/encoder/encoder_norm/scale/v": np.full(12, 2.5, np.float32),
}


def same(found: T5xCheckpoint) -> None:
    assert found.shapes == {name: a.shape for name, a in ARRAYS.items()} | {"state/step": ()}
    for name, array in ARRAYS.items():
        assert np.array_equal(found.read(name), array), name


@pytest.mark.parametrize("driver", ["file", "gfile", "gcs"])
def test_what_another_program_wrote_is_read_wherever_it_was_written(
    tmp_path: Path, driver: str
) -> None:
    place = t5x_files.write(tmp_path, 70, ARRAYS, driver)
    t5x_files.write(tmp_path, 9, {})
    (tmp_path / "checkpoint_80.tmp-1").mkdir()  # left by a killed job
    assert t5x.steps(tmp_path) == {70: place, 9: tmp_path / "checkpoint_9"}
    found = T5xCheckpoint(place)
    same(found)
    assert found.step == 70


@pytest.mark.filterwarnings("ignore")
def test_what_t5x_writes_by_orbax_is_read(tmp_path: Path) -> None:
    tree = {"target": {"a": {"kernel": jnp.arange(6.0).reshape(2, 3)}}, "state": {"step": 8}}
    tree["target"]["b"] = {"scale": jnp.ones(3, jnp.bfloat16)}
    with ocp.PyTreeCheckpointer() as writer:
        writer.save((tmp_path / "checkpoint_8" / "state").absolute(), tree)
    found = T5xCheckpoint(t5x.steps(tmp_path)[8])
    assert found.step == 8
    assert np.array_equal(found.read("target/a/kernel"), np.arange(6.0).reshape(2, 3))
    assert found.read("target/b/scale").dtype == np.float32


def test_what_is_written_has_the_form_that_t5x_reads(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place = t5x.write(tmp_path, 12, ARRAYS)
    assert place == tmp_path / "checkpoint_12"
    found = T5xCheckpoint(place)
    same(found)
    assert found.step == 12
    index = msgpack.unpackb((place / "checkpoint").read_bytes(), strict_map_key=False)
    assert index.keys() == {"version", "optimizer"}
    # A large array is a zarr folder, which the index names relative to the checkpoint.
    spec = index["optimizer"]["target"]["zeros"]["kernel"]
    assert (spec["driver"], spec["kvstore"]["path"]) == ("zarr", "target.zeros.kernel")
    about = json.loads((place / "target.zeros.kernel" / ".zarray").read_text())
    assert spec["metadata"]["shape"] == about["shape"] == [4, 512]
    assert {path.name for path in place.iterdir()} == {"checkpoint", "target.zeros.kernel"}


def test_t5x_itself_reads_what_is_written(tmp_path: Path) -> None:
    checkpoints = pytest.importorskip("t5x.checkpoints")
    tree = checkpoints.load_t5x_checkpoint(str(t5x.write(tmp_path, 12, ARRAYS)))
    for name, array in {**ARRAYS, "state/step": np.int32(12)}.items():
        found = tree
        for part in name.split("/"):
            found = found[part]
        assert np.array_equal(found, array), name


def test_what_is_damaged_or_foreign_is_one_line(tmp_path: Path) -> None:
    name = "target/encoder/layers_0/mlp/wo/kernel"
    place = t5x_files.write(tmp_path, 1, ARRAYS)
    (place / name.replace("/", ".") / "1.0").unlink()
    with pytest.raises(InputError, match=r"mlp/wo/kernel cannot be read: .*missing"):
        T5xCheckpoint(place).read(name)
    index = place / "checkpoint"
    index.write_bytes(b'model_checkpoint_path: "model.ckpt-1"')
    with pytest.raises(InputError, match="a checkpoint of TensorFlow"):
        T5xCheckpoint(place)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": "../../etc"}, "metadata": {}}
    index.write_bytes(
        cast(bytes, msgpack.packb({"version": 3, "optimizer": {"target": {"a": spec}}}))
    )
    with pytest.raises(InputError, match="names no folder in the checkpoint"):
        T5xCheckpoint(place)
    with pytest.raises(InputError, match="no checkpoint of T5X"):
        T5xCheckpoint(tmp_path)


def _damaged_indexes(index: bytes) -> Iterator[bytes]:
    """Yields the index cut anywhere, with other bytes, or with a missing or other value."""
    draw = np.random.default_rng(0)
    yield from (index[:end] for end in range(0, len(index), 37))
    yield from (draw.bytes(size) for size in (1, 10, 300))
    for at in draw.integers(0, len(index), 200):
        yield index[:at] + draw.bytes(1) + index[at + 1 :]
    deep: Any = 3
    for _ in range(400):
        deep = {"a": deep}
    array = msgpack.packb(([10**9, 2], "float32", b"1234"))
    ext = [msgpack.ExtType(number, array) for number in (1, 2, 3, 4)]
    chunked = {"__msgpack_chunked_array__": True, "shape": [2]}
    others = (None, [], {}, "text", 3, b"bytes", [3, [4]], deep, {"driver": 1, "kvstore": 1}, *ext,
              {"driver": "zarr", "kvstore": {"path": 3}}, chunked)  # fmt: skip
    tree = msgpack.unpackb(index, strict_map_key=False)
    yield from (cast(bytes, msgpack.packb(other)) for other in others)

    def inside(branch: dict) -> Iterator[bytes]:
        for name, value in list(branch.items()):
            if isinstance(value, dict):
                yield from inside(value)
            for other in others:
                branch[name] = other
                yield cast(bytes, msgpack.packb(tree))
            del branch[name]
            yield cast(bytes, msgpack.packb(tree))
            branch[name] = value

    yield from inside(tree)


@pytest.mark.parametrize("name", ["checkpoint", ".zarray", "chunk"])
def test_whatever_is_damaged_in_a_checkpoint_is_one_line(name: str, tmp_path: Path) -> None:
    kernel = "target/encoder/layers_0/mlp/wo/kernel"
    place = t5x_files.write(tmp_path, 1, {name: ARRAYS[name] for name in [*ARRAYS][:2]})
    zarr = place / kernel.replace("/", ".")
    path = {"checkpoint": place / name, ".zarray": zarr / name, "chunk": zarr / "0.0"}[name]
    text = path.read_bytes()

    def read() -> None:
        found = T5xCheckpoint(place)
        assert found.step >= 0
        for one in found.shapes:
            found.read(one)

    kinds: dict[str, Callable[[], Iterator[bytes]]] = {
        "checkpoint": lambda: _damaged_indexes(text),
        ".zarray": lambda: damaged_json(text.decode()),
        "chunk": lambda: (text[:end] for end in range(len(text) - 1)),
    }
    times = 0
    for damaged in kinds[name]():
        path.write_bytes(damaged)
        times += refused(read, str(place))
    assert times >= 10
    path.write_bytes(text)
    assert not refused(read, str(place))


def test_a_checkpoint_is_of_its_own_files(tmp_path: Path) -> None:
    """A pipe would never end, and a link may lead to a file of the user's."""
    place = t5x_files.write(tmp_path, 1, ARRAYS)
    os.mkfifo(place / "pipe")
    with pytest.raises(InputError, match="not a file but a pipe"):
        T5xCheckpoint(place)
    (place / "pipe").unlink()
    (place / "link").symlink_to("/etc")
    with pytest.raises(InputError, match="a link to /etc, outside"):
        T5xCheckpoint(place)
