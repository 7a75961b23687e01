"""Initial parameters from a trained model: the same, grown, or cut by a named rule.

Every parameter of the new model has a source in the old one and a rule, or starts new. Rules:

| new parameter | rule |
| --- | --- |
| of the same shape | taken, bit-equal |
| rows of an embedding | by piece; a piece that the old vocabulary lacks has the mean of its bytes' rows |
| rows of a gate's tasks | by the names of the directions; a task whose directions had no common row starts new |
| experts where there was one feed-forward layer | copies of it, a new router: sparse upcycling (Komatsuzaki et al. 2023, arXiv 2212.05055) |
| more experts | copies of expert j mod E, and of the router's columns |
| fewer experts | those that training used most, and their columns of the router |
| one feed-forward layer where there were experts | their mean, weighed by use |
| layers beyond the old ones | `layers`: stacked (Gong et al. 2019, "Efficient Training of BERT by Progressively Stacking"), spaced evenly, or without effect (the last products are 0) |
"""  # noqa: E501

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from m4.data.vocabulary.vocabulary import Vocabulary
from m4.model.stack import unstack
from m4.model.transformer import Transformer, abstract_variables
from m4.settings import InputError, OneOf, SettingError, checked
from m4.storage.checkpoints import by_path
from m4.train.optimizer import FactoredState, Moments

Array = jax.Array
Shapes = Mapping[str, tuple[int, ...]]
# Layer -> number of choices of each expert.
Use = Mapping[str, npt.NDArray[np.int64]]
# Path of a parameter with unscanned layers -> its NumPy or JAX array.
Old = Callable[[str], Any]


@checked
@dataclasses.dataclass(frozen=True)
class InitialModel:
    """The trained model that a new one begins from, and the rules by which it grows.

    Attributes:
        run: Folder or address of a run, at its latest step or as RUN@STEP; or a MODEL_DIR or
            checkpoint_<step> of T5X; or a pretrained model of T5's family in Hugging Face's layout.
        optimizer: Whether to take the optimizer's state and the step too, so that the schedule and
            the stream continue there. Arrays that grew keep their old part; an optimizer with other
            arrays begins from zero at that step.
        new_pieces: Initial embedding of a new piece: the mean of its bytes' embeddings ("bytes") or
            of the pieces that spelled it ("pieces"), or "random".
        layers: Rule for another number of layers. By default it must be the same. "stack": layer i
            is the old layer i mod n. "zeros": layers beyond the old ones start without effect.
            "spaced": layer i is the old layer i * n / m of m, also for fewer layers.
        allow_modules: Modules outside m4 that the run's config may import (and run), as NAME or
            NAME=FOLDER.
        vocabulary: SentencePiece model, or its folder, of a T5X checkpoint's training. Defaults to
            the one that `m4 export` left next to the checkpoint.
    """

    run: str
    optimizer: bool = False
    new_pieces: Annotated[str, OneOf(("bytes", "pieces", "random"))] = "bytes"
    layers: Annotated[str | None, OneOf(("stack", "zeros", "spaced"))] = None
    allow_modules: Sequence[str] = ()
    vocabulary: str | None = None


# Rules for tables whose rows are paired by name, for arrays that may be larger than the old ones,
# and for those that need counts of the experts' use.
_BY_ROW = ("pieces", "directions")
_GROWING = ("pieces", "copied experts", "copied columns")
_BY_USE = ("most used experts", "most used columns", "merged experts")
_SCANNED = re.compile(r"(\w+)_blocks/layer_(\d+)/(.*)")


class Rows(NamedTuple):
    """Sources of the rows of a new vocabulary [V] in an old one."""

    old_V: npt.NDArray[np.int32]  # old row of each, or -1 for a new piece
    spelled: Mapping[int, Sequence[int]]  # new id -> the old ids that spell it


class Leaf(NamedTuple):
    """A parameter of the new model: its path with unscanned layers, its rule and its source."""

    path: str
    rule: str
    source: str = ""  # path in the old model, or "" if nothing is taken from it
    layer: str = ""  # layer in the old model, for the use of its experts


def rows_of(old: Vocabulary, new: Vocabulary, new_pieces: str) -> Rows:
    """Pairs two vocabularies by pieces. Raises InputError if the new one lacks an old piece."""
    ids, there = {piece: i for i, piece in enumerate(old.pieces)}, set(new.pieces)
    missing = [piece for piece in old.pieces if piece not in there]
    if missing:
        raise InputError(
            f"{new.path}: another vocabulary than {old.path}, {len(missing):,} of whose "
            f"{old.size:,} pieces it lacks ({missing[0]!r}, ...): a vocabulary may only grow; "
            "CorpusSpec.vocabulary_from takes that run's"
        )
    old_V = np.array([ids.get(piece, -1) for piece in new.pieces], np.int32)
    first, spelled = old.byte_ids.start, {}
    if new_pieces == "bytes" and not old.byte_ids and (old_V < 0).any():
        allowed = f"'pieces' or 'random': {old.path} has no pieces for bytes"
        raise SettingError("InitialModel.new_pieces", new_pieces, allowed)
    for i in np.flatnonzero(old_V < 0):
        text = new.pieces[i].replace("▁", " ").strip() or " "
        if new_pieces == "bytes":
            spelled[int(i)] = [first + byte for byte in text.encode()]
        elif new_pieces == "pieces":
            spelled[int(i)] = old.encode([text])[0]
    return Rows(old_V, spelled)


# Settings that decide what a model computes; gates, capacities and dropout may differ.
_COMPUTATION = (
    "activations", "tied_logits", "absolute_positions", "relative_bias", "relative_distance",
    "head_width",
)  # fmt: skip


def check_computation(model: Transformer, wanted: Mapping[str, Any], folder: object) -> None:
    """Raises SettingError if a model computes otherwise than another's `wanted` settings."""
    here = computation(model)
    for name, value in wanted.items():
        if (given := here[name] if name in here else getattr(model, name)) != value:
            setting = name if "." in name else f"Transformer.{name}"
            raise SettingError(setting, given, f"{value!r}, as in {folder}")


def computation(model: Transformer) -> dict[str, Any]:
    """Returns the settings that decide what a model computes, by name."""
    found = {name: getattr(model, name) for name in _COMPUTATION}
    experts = model.encoder_experts, model.decoder_experts
    inside = [one.activations or model.activations for one in experts if one is not None]
    return {**found, "MoeLayer.activations": [*dict.fromkeys(inside or [model.activations])]}


def task_rows(old: Sequence[Set[str]], new: Sequence[Set[str]]) -> Rows:
    """Pairs a gate's tasks: a new task gets the row of the old one that has all its directions."""
    of = {name: number for number, names in enumerate(old) for name in names}
    known = [{of[name] for name in names if name in of} for names in new]
    return Rows(np.array([one.pop() if len(one) == 1 else -1 for one in known], np.int32), {})


class Plan(NamedTuple):
    """The source and rule of each parameter that a new model takes over from an old one.

    Paths ("encoder_1/moe/...") are those of unscanned layers. `rows` pairs rows of tables by name.
    """

    old: Shapes  # shapes of the old and of the new model
    new: Shapes
    leaves: Sequence[Leaf]
    rows: Mapping[str, Rows]

    def unused(self) -> list[str]:
        """Returns the old parameters that are not used."""
        return sorted(self.old.keys() - {leaf.source for leaf in self.leaves})

    def grown_sizes(self) -> set[tuple[int, int]] | None:
        """Returns (before, now) of grown axes, or None if anything else has changed."""
        if not all(leaf.rule in ("taken", *_GROWING) for leaf in self.leaves):
            return None
        return {
            (before, now)
            for leaf in self.leaves
            if leaf.rule in _GROWING
            for before, now in zip(self.old[leaf.source], self.new[leaf.path], strict=True)
            if before < now
        }

    def fresh_paths(self, like: Any) -> list[str]:
        """Returns the paths of a tree whose arrays need a new model's values."""

        def is_fresh(leaf: Leaf) -> bool:
            if leaf.rule not in _BY_ROW:
                return leaf.rule == "new"
            rows = np.flatnonzero(self._places(leaf) < 0)
            return any(row not in self.rows[leaf.path].spelled for row in rows)

        needed = {leaf.path for leaf in self.leaves if is_fresh(leaf)}
        return [path for path, parts in _parts(like).items() if needed.intersection(parts)]

    def take_over(self, old: Old, fresh: dict[str, Any], use: Use, like: Any) -> Any:
        """Makes the new model's parameters one by one, the largest first, to save memory.

        `fresh` has the new model's arrays that `fresh_paths` names, and is emptied; `like` is the
        tree of shapes and shardings. Raises InputError if experts without counts are to be cut.
        """
        known = {leaf.path: leaf for leaf in self.leaves}
        wanted, parts = by_path(like), _parts(like)
        made = {}
        for path in sorted(wanted, key=lambda path: -math.prod(wanted[path].shape)):
            leaves, scanned = [known[part] for part in parts[path]], parts[path] != [path]
            array = self._array(leaves, scanned, wanted[path], old, fresh.pop(path, None), use)
            # Otherwise the next ones would be read while this one waits to be computed.
            made[path] = jax.block_until_ready(array)
        return _shaped(like, made)

    def _places(self, leaf: Leaf) -> npt.NDArray[np.int32]:
        """Returns the old row, or -1, of each row of a new table; rows without a piece stay."""
        axis, old_V = int(leaf.path.startswith("logits_dense")), self.rows[leaf.path].old_V
        found = np.arange(self.new[leaf.path][axis], dtype=np.int32)
        found[: len(old_V)] = old_V
        found[found >= self.old[leaf.source][axis]] = -1
        return found

    def _is_taken(self, leaf: Leaf) -> bool:
        if leaf.rule not in _BY_ROW:
            return leaf.rule == "taken"
        places_V, shape = self._places(leaf), self.new[leaf.path]
        return self.old[leaf.source] == shape and np.array_equal(places_V, np.arange(len(places_V)))

    def _array(
        self, leaves: Sequence[Leaf], scanned: bool, like: Any, old: Old, fresh: Any, use: Use
    ) -> Array:
        """Makes one array of the tree: one parameter, or those of a scanned stack's layers."""
        found = old(leaves[0].source) if leaves[0].source else None
        if all(map(self._is_taken, leaves)):
            if isinstance(found, np.ndarray):
                if scanned:
                    found = np.broadcast_to(found, like.shape).copy()
                    for at, leaf in enumerate(leaves[1:], 1):
                        found[at] = old(leaf.source)
                return jax.make_array_from_callback(like.shape, like.sharding, lambda at: found[at])
            if not scanned:
                return jax.device_put(found, like.sharding)

        def make(given: Sequence[Array | None], start: Array | None) -> Array:
            starts = start if scanned and start is not None else [start] * len(given)
            each = zip(leaves, given, starts, strict=True)
            made = [self._made(*one, use) for one in each]
            return jnp.stack(made) if scanned else made[0]

        rest = [old(leaf.source) if leaf.source else None for leaf in leaves[1:]]
        return jax.jit(make, out_shardings=like.sharding)([found, *rest], fresh)

    def _made(self, leaf: Leaf, x: Any, start: Any, use: Use) -> Array:
        shape, rule = self.new[leaf.path], leaf.rule
        if rule in _BY_USE and leaf.layer not in use:
            raise InputError(
                f"{leaf.path}: experts are left out or merged by their use, which the run that it "
                f"begins from has not counted in {leaf.layer}"
            )
        match rule:
            case "zeros":
                return jnp.zeros(shape)
            case "new":
                return start
            case "taken":
                return x
            case "pieces" | "directions":
                places_V, rows = self._places(leaf), self.rows[leaf.path]
                if leaf.path.startswith("logits_dense"):
                    start = None if start is None else start.T
                    return _grown(x.T, start, places_V, rows).T
                return _grown(x, start, places_V, rows)
            case "upcycled":
                return jnp.broadcast_to(x, shape)
            case "copied experts":
                return x[np.arange(shape[0]) % x.shape[0]]
            case "copied columns":
                return x[:, np.arange(shape[1]) % x.shape[1]]
            case "most used experts":
                return x[most_used(use[leaf.layer], shape[0])]
            case "most used columns":
                return x[..., most_used(use[leaf.layer], shape[-1])]
        assert rule == "merged experts", rule
        used = use[leaf.layer]
        weight = used / used.sum() if used.any() else np.full(len(used), 1 / len(used))
        return jnp.tensordot(jnp.asarray(weight, x.dtype), x, 1, precision="highest")


def plan(
    old: Shapes, model: Transformer, layers: str | None, rows: Callable[[str], Rows] | None = None
) -> Plan:
    """Chooses the source and rule of each parameter of a model.

    `layers` is that of `InitialModel`; `rows` has the rows of tables by path, if known yet. Raises
    InputError if the number of layers differs without a rule, or no rule fits a parameter.
    """
    new = shapes_of(model)
    depth = {stack: (_depth(old, stack), _depth(new, stack)) for stack in ("encoder", "decoder")}
    for stack, (before, after) in depth.items():
        if before != after and (layers is None or (after < before and layers != "spaced")):
            raise InputError(
                f"InitialModel.layers = {layers}: the model has {after} {stack} layers, the one "
                f"that it begins from {before}: must be 'spaced'"
                + (", 'stack' or 'zeros'" if after > before else "")
            )
    leaves = [_leaf(path, old, new, depth, layers) for path in new]
    found: dict[str, Rows] = {}
    for at, leaf in enumerate(leaves):
        if rows is not None and leaf.rule in _BY_ROW:
            found[leaf.path] = rows(leaf.path)
            same = np.array_equal(found[leaf.path].old_V, np.arange(old[leaf.source][0]))
            if leaf.rule == "directions" and same:
                leaves[at] = leaf._replace(rule="taken")
    return Plan(old, new, leaves, found)


def _leaf(path: str, old: Shapes, new: Shapes, depth: Mapping[str, Any], layers: Any) -> Leaf:
    source, beyond, layer = path, False, ""
    if match := re.match(r"(encoder|decoder)_(\d+)/(.*)", path):
        stack, number = match[1], int(match[2])
        before, after = depth[stack]
        layer = f"{stack}_{number * before // after if layers == 'spaced' else number % before}"
        source, beyond = f"{layer}/{match[3]}", number >= before
    found = _rule(path, source, new[path], old)
    if found is None:
        there = old.get(source)
        raise InputError(
            f"{path} is {list(new[path])} here and {list(there) if there else 'missing'} in the "
            "model that it begins from: no rule takes it over"
        )
    if layers == "zeros" and beyond and re.search(r"(/out|/wo)/kernel$", path):
        return Leaf(path, "zeros")
    source, rule = found
    return Leaf(path, rule, "" if rule == "new" else source, layer)


def _rule(path: str, source: str, shape: tuple[int, ...], old: Shapes) -> tuple[str, str] | None:
    """Returns the source's path and a rule, or None if no rule fits these shapes."""
    there = old.get(source, (0,))  # a missing source, for which no rule fits
    if re.search(r"embedder/embedding$|^logits_dense/kernel$", path) and source in old:
        width = int(not path.startswith("logits_dense"))
        return (source, "pieces") if len(there) == 2 and there[width] == shape[width] else None
    if path.endswith("/tasks/kernel") and there[1:] == shape[1:]:
        return source, "directions"
    if there == shape:
        return source, "taken"
    if "/moe/experts/" in path:
        if there[1:] == shape[1:]:
            return source, "copied experts" if shape[0] > there[0] else "most used experts"
        single = source.replace("/moe/experts/", "/mlp/")
        return (single, "upcycled") if old.get(single) == shape[1:] else None
    if "/moe/" in path:
        # A gate's columns go with its experts. With more experts, only the router's are copied, and
        # other parameters of a gate start new.
        if source in old and there[:-1] == shape[:-1]:
            if shape[-1] < there[-1] and re.search(r"/moe/(\w+/kernel|bias/table)$", path):
                return source, "most used columns"
            if path.endswith("router/kernel"):
                return source, "copied columns"
        return source, "new"
    several = source.replace("/mlp/", "/moe/experts/")
    if "/mlp/" in path and old.get(several, ())[1:] == shape:
        return several, "merged experts"
    return None


def unscanned(params: Mapping[str, Any]) -> Old:
    """Returns a function that reads a parameter by its path with unscanned layers."""
    arrays = by_path(params)
    places = {part: (path, at) for path, parts in _parts(params).items()
              for at, part in enumerate(parts)}  # fmt: skip

    def array(path: str) -> Array:
        there, block = places[path]
        return arrays[there] if there == path else arrays[there][block]

    return array


def _grown(
    old_VM: Array, fresh_VM: Array | None, places_V: npt.NDArray[np.int32], rows: Rows
) -> Array:
    """Returns the new table: old rows, bit-equal, in their places; others spelled or fresh."""
    table = old_VM[np.maximum(places_V, 0)]
    if fresh_VM is not None:
        table = jnp.where((places_V >= 0)[:, None], table, fresh_VM)
    if not rows.spelled:
        return table
    longest = max(map(len, rows.spelled.values()))
    index_NW = np.zeros((len(rows.spelled), longest), np.int32)
    share_NW = np.zeros((len(rows.spelled), longest), np.float32)
    for n, spelled in enumerate(rows.spelled.values()):
        index_NW[n, : len(spelled)] = spelled
        share_NW[n, : len(spelled)] = 1 / len(spelled)
    means_NM = jnp.einsum("NW,NWM->NM", share_NW, old_VM[index_NW], precision="highest")
    return table.at[np.array([*rows.spelled])].set(means_NM)


def most_used(used_E: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Returns the `count` most often chosen experts, in ascending order."""
    return np.sort(np.argsort(-used_E, kind="stable")[:count])


def _depth(paths: Shapes, stack: str) -> int:
    numbers = [int(m[1]) for path in paths if (m := re.match(rf"{stack}_(\d+)/", path))]
    return max(numbers, default=-1) + 1


def fits(old: Shapes, new: Shapes, grown: set[tuple[int, int]]) -> bool:
    """Returns whether arrays match the old ones, except for axes that grew like the parameters'."""
    return old.keys() == new.keys() and all(
        len(old[path]) == len(shape)
        and all(pair[0] == pair[1] or pair in grown for pair in zip(old[path], shape, strict=True))
        for path, shape in new.items()
    )


def padded(old: Array, fresh: Array) -> Array:
    """Returns `fresh` with the values of `old` at the start of each axis."""
    return jax.lax.dynamic_update_slice(fresh, old, (0,) * fresh.ndim)


def shapes_of(model: Transformer) -> dict[str, tuple[int, ...]]:
    """Returns path with unscanned layers -> shape, for a model's parameters."""
    params = jax.eval_shape(unstack, abstract_variables(model)["params"])
    return {path: leaf.shape for path, leaf in by_path(params).items()}


def parts_of(shapes: Shapes) -> dict[str, list[str]]:
    """Returns path in a tree -> its paths with unscanned layers, several for a scanned stack."""
    found, layers = {path: [path] for path in shapes}, dict[str, int]()
    scanned = [match for path in shapes if (match := _SCANNED.fullmatch(path))]
    for stack, layer, _ in map(re.Match.groups, scanned):
        layers[stack] = max(layers.get(stack, 0), int(layer) + 1)
    for match in scanned:
        stack, layer, inner = match.groups()
        numbers = range(int(layer), shapes[match[0]][0] * layers[stack], layers[stack])
        found[match[0]] = [f"{stack}_{number}/{inner}" for number in numbers]
    return found


def _parts(like: Any) -> dict[str, list[str]]:
    return parts_of({path: leaf.shape for path, leaf in by_path(like).items()})


def _shaped(like: Any, arrays: Mapping[str, Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in by_path(like)])


# Moments of each parameter of T5X: "rows" and "columns" of its matrices, or "" for full moments.
Given = Mapping[str, Mapping[str, Any]]


def check_adafactor(optimizer: optax.GradientTransformation) -> None:
    """Raises SettingError unless an optimizer's state has Adafactor's moments."""
    one = {"kernel": jax.ShapeDtypeStruct((1,), jnp.float32)}
    state = jax.eval_shape(optimizer.init, one)
    if not any(isinstance(leaf, FactoredState) for leaf in jax.tree.leaves(state, is_leaf=_known)):
        allowed = "False: a checkpoint of T5X has Adafactor's state, and the optimizer is another"
        raise SettingError("InitialModel.optimizer", True, allowed)


def at_step(state: Any, step: int, given: Given | None = None) -> Any:
    """Returns an optimizer's initial state with its learning rate at `step`; for tracing.

    With moments `given`, by path with unscanned layers, Adafactor's are those after `step` steps. A
    matrix that only one of the two optimizers factors gets the product of factors or means of
    moments.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, optax.ScaleByScheduleState):
            return leaf._replace(count=jnp.full_like(leaf.count, step))
        if given is not None and isinstance(leaf, FactoredState):
            return FactoredState(jnp.full_like(leaf.count, step), _tree(leaf.moments, given))
        return leaf

    return jax.tree.map(one, state, is_leaf=_known)


def _known(leaf: Any) -> bool:
    return isinstance(leaf, FactoredState | optax.ScaleByScheduleState)


def _tree(like: Any, given: Given) -> Any:
    made = {}
    for path in by_path(jax.eval_shape(unstack, like)):
        name, _, part = path.rpartition("/")
        if part in Moments._fields:
            of = given[name]
            made[path] = of[part] if part in of else jnp.mean(of[""], -1 if part == "rows" else -2)
        elif "" in (of := given[path]):
            made[path] = of[""]
        else:  # like the factors in `scale_by_matrix`
            factors = of["rows"] / jnp.mean(of["rows"], -1, keepdims=True)
            made[path] = factors[..., :, None] * of["columns"][..., None, :]
    stacked = {path: made[path] if path in made else jnp.stack([made[part] for part in parts])
               for path, parts in _parts(like).items()}  # fmt: skip
    return _shaped(like, stacked)
