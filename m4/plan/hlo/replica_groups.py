"""Replica groups of collectives, in HLO's four notations, and libtpu's of groups between slices."""

import functools
import itertools
import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_GROUPS = re.compile(
    r"replica_groups=(?:"
    r"(?P<all>\{\})|"  # every device, in one group
    r"\{(?P<list>\{[\d,{}]*\})\}|"  # {{0,1},{2,3}}
    r"\[(?P<shape>[\d,]+)\]<=(?P<iota>\[[\d,]+\](?:T\([\d,]+\))?)|"  # [4,2]<=[2,2,2]T(0,2,1)
    # mesh['a'=2,'b'=4] {'b'}: the groups along some axes of a mesh. It may have an order of
    # devices and sub-axes: 'b':(2)2 has size 2 and is inside of the outermost 2 of 'b'.
    r"mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<axes>[^}]*)\}"
    r")"
)
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")


def read_groups(line: str, devices: int) -> Groups:
    """The groups in an instruction's text.

    Args:
        devices: of the whole program, for `replica_groups={}`.

    Raises:
        ValueError: none, or in an unknown notation.
    """
    found = _GROUPS.search(line)
    if found is None:
        raise ValueError(f"HLO: no readable replica groups in '{line.strip()[:200]}'")
    return _groups(found[0], devices)


def read_pairs(line: str) -> Groups:
    """The (source, target) pairs of a collective-permute. ValueError: there are none."""
    found = _PAIRS.search(line)
    if found is None:
        raise ValueError(f"HLO: no source_target_pairs in '{line.strip()[:200]}'")
    return _lists(found[1])


# "{1,2}x{0:7}": each of the devices 0 to 7 with those of its number in slices 1 and 2; or groups or
# pairs of numbers slice * 100000 + device, {{100000,200000}} and {{100000->200000}}.
_TARGET = re.compile(r'_xla_megascale_target="?([\d,:{}x>-]+)')
_SLICE = 100_000


def read_slices(line: str, devices: int) -> tuple[Groups, int]:
    """The groups of an exchange between slices, devices numbered slice by slice, and how many
    slices a group has.

    Args:
        devices: of one slice.

    Raises:
        ValueError: none, or in an unknown notation.
    """
    found = _TARGET.search(line)
    if found is None:
        raise ValueError(f"HLO: no readable slices in '{line.strip()[:200]}'")
    target = found[1]
    if "x" in target:
        slices, places = (_ranges(part) for part in target.split("x"))
        groups = tuple(tuple((each - 1) * devices + place for each in slices) for place in places)
    else:
        groups = tuple(
            tuple((number // _SLICE - 1) * devices + number % _SLICE for number in group)
            for group in _lists(target.replace("->", ","))
        )
    return groups, len({device // devices for device in groups[0]})


def _ranges(text: str) -> list[int]:
    """{0:3,7} -> [0, 1, 2, 3, 7]."""
    found = [_numbers(part) for part in text.split(",")]
    return [number for ends in found for number in range(ends[0], ends[-1] + 1)]


@functools.lru_cache(maxsize=1024)  # a program has few, and they may list 2048 devices
def _groups(text: str, devices: int) -> Groups:
    found = _GROUPS.fullmatch(text)
    assert found is not None
    if found["all"]:
        return (tuple(range(devices)),)
    if found["list"]:
        return _lists(found["list"])
    if found["shape"]:
        return _tuples(_iota(found["iota"]).reshape(_numbers(found["shape"])))
    return _mesh_groups(found["mesh"], found["ids"], found["axes"])


def _mesh_groups(mesh: str, ids: str | None, axes: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh)}
    wanted = re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", axes)
    # Each axis is split where a sub-axis of the groups begins or ends.
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        cuts = {1, size}
        for axis, pre, length in wanted:
            if axis == name and pre:
                cuts |= {int(pre), int(pre) * int(length)}
        for start, end in itertools.pairwise(sorted(cuts)):
            place[name, start] = len(shape)
            shape.append(end // start)
    together: list[int] = []
    for name, pre, length in wanted:
        first = int(pre) if pre else 1
        last = first * (int(length) if length else sizes[name])
        together += [
            at for (axis, start), at in place.items() if axis == name and first <= start < last
        ]
    if ids is None:
        order = np.arange(math.prod(shape))
    else:
        order = _iota(ids) if ids.startswith("[") else np.array(_numbers(ids))
    apart = [at for at in range(len(shape)) if at not in together]
    group = math.prod(shape[at] for at in together)
    return _tuples(order.reshape(shape).transpose(*apart, *together).reshape(-1, group))


def _iota(text: str) -> np.ndarray:
    """[2,4]T(1,0) -> 0 ... 7 in that shape, transposed by these axes, flattened."""
    shape, _, axes = text.partition("T")
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (numbers.transpose(_numbers(axes)) if axes else numbers).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _lists(text: str) -> Groups:
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", text))


def _tuples(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())
