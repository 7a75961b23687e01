"""`m4 extract`: makes a run folder with the experts and pieces that some directions need.

Source: Kudugunta et al. 2021, "Beyond Distillation: Task-level Mixture-of-Experts for Efficient
Inference" (arXiv 2110.03742), section 3.2. For gates by token: Koishekenov et al. 2023,
"Memory-efficient NLLB-200: Language-specific Expert Pruning" (arXiv 2212.09811).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from m4.build import build
from m4.config import Config
from m4.data.cache.cache import Cache
from m4.data.cache.tokens import ROLES, vocabulary_file
from m4.data.corpus import CorpusSpec
from m4.data.directions import base_language, key_of, languages_of, pair_of, split_direction
from m4.data.preprocess import tag
from m4.data.sources import SPLITS
from m4.data.vocabulary.pieces import trimmed, used_ids
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.eval.decoding.decode import translations
from m4.eval.decoding.inference_checkpoint import placed, restore_params
from m4.eval.decoding.routing_counter import counted, forced
from m4.eval.decoding.score_references import TOKENS, batches, score_references
from m4.eval.decoding.search import run_model
from m4.eval.decoding.testsets import Portion, split_pairs
from m4.eval.decoding.translate import Translator
from m4.eval.metrics import bleu as bleus
from m4.experiment import Experiment, identity
from m4.jobs.checkpoints.initial import tasks_of
from m4.jobs.corpus import keep_vocabulary, open_corpus
from m4.model.transformer import Transformer, abstract_variables
from m4.settings import InputError
from m4.storage import run_folder
from m4.storage.checkpoints import Checkpoints
from m4.storage.files import whole
from m4.train import initial
from m4.train.measuring.routing_counts import Counts

# Gates that choose the k best of all experts, so that removing other experts keeps the choices.
_GATES = ("base", "by_direction", "deepseek", "dense_to_sparse", "mixtral", "noisy_topk", "switch",
          "top2_gshard", "topk")  # fmt: skip
_SHARE = 0.95
_COUNTED = 1000  # sentences per direction to count choices on, from dev or otherwise from training


class Part(NamedTuple):
    """Part of a model to extract."""

    of: Translator
    cache: Cache  # languages and vocabularies of the model
    step: int
    use: initial.Use  # how often the directions' tokens choose each expert, by layer
    experts: int  # number of experts to keep in each layer, the most used ones
    ids: Mapping[str | None, Sequence[int]]  # pieces to keep, by the role of their vocabulary


def check(experiment: Experiment, keep: int | None, share: float | None) -> None:
    """Checks everything that is known before the model is read."""
    model, run = build(experiment, None).model, experiment.model_dir
    for layer in (model.encoder_experts, model.decoder_experts):
        if layer is None:
            raise InputError(f"{run}: a dense model, which has no experts")
        gate = identity(layer.gate)
        if gate["of"] not in _GATES or gate.get("expert_groups", 1) != 1:
            raise InputError(
                f"{run}: its gate is {gate['of']}, whose choices depend on experts that would go; "
                f"extract takes {', '.join(_GATES)}, without groups"
            )
        if keep is not None and not 1 <= keep <= layer.num_experts:
            raise InputError(f"--keep={keep}: must be from 1 to {layer.num_experts}, its experts")
    if share is not None and not 0 < share <= 1:
        raise InputError(f"--keep_share={share}: must be above 0 and at most 1")


def chosen(
    experiment: Experiment, directions: Sequence[str], keep: int | None, share: float | None,
    step: int | None,
) -> Part:  # fmt: skip
    """Chooses the experts and pieces that directions need.

    Each layer keeps `keep` experts, or those that get a `share` of the choices (0.95). With a gate
    by task, it keeps all experts that the tasks choose.
    """
    cache = open_corpus(experiment)
    pairs = Portion("dev", _COUNTED, tuple(directions)).pairs(cache)
    if missing := tuple(name for name in directions if name not in pairs):
        pairs |= Portion("train", _COUNTED, missing).pairs(cache)
    if not cache.marked:
        raise InputError(f"{cache.folder}: its source gives ids, whose vocabulary cannot be cut")
    parts, checkpoints = build(experiment, cache), experiment.folder / "checkpoints"
    params, found, _ = restore_params(parts.model, checkpoints, step, cache.vocabulary)
    model = parts.ready(params, experiment.decoding, None)
    use, shapes, most = use_of(model, pairs), initial.shapes_of(parts.model), 0
    for layer, count_E in use.items():
        by_task = f"{layer}/moe/tasks/kernel" in shapes
        if by_task or keep is None:  # the fewest experts that together get this share
            least = (1.0 if by_task else share or _SHARE) * count_E.sum()
            reached = np.cumsum(np.sort(count_E)[::-1]) >= least
            most = max(most, int(np.argmax(reached)) + 1)
    if keep is not None and keep < most:
        raise InputError(f"--keep={keep}: the tasks of these directions choose {most} experts")
    tags = [*map(base_language, languages_of(map(pair_of, directions)))]
    ids = {
        role: used_ids(_vocabulary(cache, role), _texts(cache, directions, role), tags)
        for role in (ROLES if cache.separate else (None,))
    }
    return Part(model, cache, found, use, keep or most, ids)


def use_of(model: Translator, pairs: Mapping[str, Sequence[tuple[str, str]]]) -> initial.Use:
    """Returns how often tokens of the directions' pairs choose each expert, by layer."""
    found, what = Counts(model.trained), "the program that counts routing"
    for direction, sentences in pairs.items():
        sources, targets = _sides(direction, sentences)
        for rows, arrays in batches(model, sources, targets, on_cut=lambda *_: None):
            number_B = np.full(len(arrays[TOKENS[0]]), len(found.directions), np.int32)
            number_B[: len(rows)] = found.directions.index(direction)  # not the padding
            source_BL, target_BT = (arrays[name] for name in TOKENS)
            batch = forced(source_BL, target_BT, number_B)
            here = run_model(None, what, counted, model.model, model.params, batch)
            found.add(jax.device_get(here))
    return {layer: count_DE.sum(axis=0) for layer, count_DE in found.layers.items()}


def _vocabulary(cache: Cache, role: str | None) -> Vocabulary:
    return Vocabulary(vocabulary_file(cache.folder, role))


def _texts(cache: Cache, directions: Sequence[str], role: str | None) -> Iterator[str]:
    """Yields sources or targets of the directions or, with the role None, both."""
    sides = {"source": slice(1), "target": slice(1, 2)}.get(role or "", slice(2))
    for split in SPLITS:
        for name in directions:
            for pair in split_pairs(cache, [name], split)[name]:
                yield from pair[sides]


def _sides(direction: str, pairs: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Returns the tagged sources, and the targets."""
    language = split_direction(direction)[1]
    return [tag(source, language) for source, _ in pairs], [target for _, target in pairs]


def bindings(config: Config, part: Part, directions: Sequence[str], output: str) -> list[str]:
    """Returns additional bindings of the part's config, for a run in the folder `output`."""
    every = config.bindings()
    corpus = next(one.selector for one in every if one.target is CorpusSpec)
    sizes = {role: len(ids) for role, ids in part.ids.items()}
    said = {
        **{one.name: part.experts for one in every if one.parameter == "num_experts"},
        f"{corpus}.languages": [*dict.fromkeys(key_of(pair_of(each)) for each in directions)],
        f"{corpus}.mixture": [*directions],
        f"{corpus}.vocabulary_from": output,
        f"{corpus}.vocabulary_size": sizes.get("source", sizes.get(None)),
        f"{corpus}.target_vocabulary_size": sizes.get("target"),
        "experiment.Data.data_dir": None,
        "experiment.Experiment.tasks": None,  # each direction is a task with its old task's row
        "experiment.Experiment.vocabulary_multiple": 1,
        "experiment.Experiment.baselines": None,
    }
    return [f"{name} = {value!r}" for name, value in said.items()]


def extract(part: Part, run: str, experiment: Experiment, tested: Portion) -> Iterator[str]:
    """Writes the part into the run folder of `experiment`; yields messages about it."""
    old, folder = part.of, experiment.folder
    for role, ids in part.ids.items():
        with whole(vocabulary_file(folder / run_folder.VOCABULARY, role)) as unfinished:
            unfinished.write_bytes(trimmed(_vocabulary(part.cache, role), ids))
    cache = open_corpus(experiment)
    assert cache.target_vocabulary.size == len([*part.ids.values()][-1])
    parts = build(experiment, cache)
    new = parts.ready(cut(part, parts.model, cache), experiment.decoding, None)
    pairs = tested.pairs(cache)
    trees = [jax.tree.leaves(model.params) for model in (old, new)]
    about: dict[str, Any] = {
        "experts": [len(next(iter(part.use.values()))), part.experts],
        "pieces": [sum(_vocabulary(each, role).size for role in part.ids)
                   for each in (part.cache, cache)],
        "parameters": [sum(leaf.size for leaf in tree) for tree in trees],
        "bytes": [sum(leaf.nbytes for leaf in tree) for tree in trees],
    }  # fmt: skip
    said = ", ".join(f"{name} {x:,} -> {y:,}" for name, (x, y) in about.items())
    yield f"{run}, step {part.step} -> {folder}: {said}"
    about |= {"run": run, "step": part.step, "directions": cache.directions, "split": tested.name}
    about["kept"] = {layer: initial.most_used(count_E, part.experts).tolist()
                     for layer, count_E in part.use.items()}  # fmt: skip
    about["scores"] = {}
    for name, each in pairs.items():
        nll, bleu = zip(*(scores(model, name, each) for model in (old, new)), strict=True)
        about["scores"][name] = {"sentences": len(each), "nll": nll, "bleu": bleu}
        yield (
            f"{name}, {len(each):,} {tested.split} sentences: nll {nll[0]:.4f} -> {nll[1]:.4f}, "
            f"BLEU {bleu[0]:.1f} -> {bleu[1]:.1f}"
        )
    run_folder.note(folder, extracted=about)
    keep_vocabulary(experiment, cache)
    note = {"vocabulary": cache.vocabulary.fingerprint, "finished": True}
    with Checkpoints(folder / "checkpoints") as store:
        store.save(part.step, {"params": new.params}, note)


def cut(part: Part, module: Transformer, cache: Cache) -> Any:
    """Returns the parameters of the smaller model, bit-equal to those of the old one."""
    old: Any = part.of.model
    params, like = part.of.params, placed(abstract_variables(module), None)

    def rows(path: str) -> initial.Rows:
        if path.endswith("tasks/kernel"):
            return initial.task_rows(tasks_of(old, part.cache), tasks_of(module, cache))
        role = None if None in part.ids else "source" if "source_token" in path else "target"
        return initial.Rows(np.array(part.ids[role], np.int32), {})

    plan = initial.plan(initial.shapes_of(old), module, None, rows)
    return plan.take_over(initial.unscanned(params), {}, part.use, like)


def scores(
    model: Translator, direction: str, pairs: Sequence[tuple[str, str]]
) -> tuple[float, float]:
    """Returns the references' loss in nats per token, and BLEU in percent."""
    sources, references = _sides(direction, pairs)
    number = [model.trained.index(direction)] * len(sources)
    scored = score_references(model, sources, references, directions=number)
    texts = [each.texts[0] for each in translations(model, sources, directions=number)]
    nll = -sum(each.logprob for each in scored) / sum(each.tokens for each in scored)
    return nll, bleus.bleu(texts, references, split_direction(direction)[1]).value()
