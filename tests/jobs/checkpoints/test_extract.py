"""`m4 extract`: the experts and pieces of some directions, as a run that other commands read."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from m4 import config
from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.directions import split_direction
from m4.data.preprocess import EOS_ID, tag
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.eval.decoding.decode import directions_for
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.testsets import split_pairs
from m4.eval.decoding.translate import Translator
from m4.jobs.checkpoints.extract import Part, cut, use_of
from m4.jobs.corpus import open_vocabulary
from m4.model import gates
from m4.model.transformer import Transformer
from m4.storage import run_folder
from tests.command_line import m4
from tests.shared import SMALL_MOE, by_target, model_for, parts_in, small_corpus, tiny_run

ASKED = ("gl-en", "pt-en")


def loaded(run: Path) -> Translator:
    experiment = config.load([run / "config.gin"], model_dir=run).experiment()
    cache = open_vocabulary(experiment)
    parts = build(experiment, cache)
    params, _, _ = restore_params(parts.model, run / "checkpoints", vocabulary=cache.vocabulary)
    return parts.ready(params, experiment.decoding, None)


def pieces(model: Translator) -> list[str]:
    assert isinstance(model.vocabulary, Vocabulary)
    return model.vocabulary.pieces


@functools.partial(jax.jit, static_argnums=0)
def applied(module: Transformer, params: Any, given: Sequence[Any], more: dict[str, Any]) -> Any:
    return module.apply({"params": params}, *given, enable_dropout=False, **more)


def logits(model: Translator, direction: str, source: str, target: str) -> np.ndarray:
    """Returns [T, pieces] logits of a sentence pair, in rows that are padded to one length."""
    vocabulary, more = model.vocabulary, {}
    source_ids = vocabulary.encode_tagged([tag(source, split_direction(direction)[1])])[0]
    target_ids = vocabulary.encode_targets([target])[0]
    ids, target_1T = np.zeros((2, 1, 64), np.int32)
    ids[0, : len(source_ids) + 1] = [*source_ids, EOS_ID]
    target_1T[0, : len(target_ids) + 1] = [*target_ids, EOS_ID]
    if directions_for(model.model, [0]) is not None:
        number = model.trained.index(direction)
        more["encoder_direction_ids"] = np.full_like(ids, number)
        more["decoder_direction_ids"] = np.full_like(target_1T, number)
    given = ids, np.pad(target_1T[:, :-1], ((0, 0), (1, 0))), target_1T
    found = applied(model.model, model.params, given, more)
    return np.asarray(found)[0, : len(target_ids) + 1, : len(pieces(model))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_target(tmp_path_factory)


@pytest.fixture(scope="module")
def part(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Extracts gl-en and pt-en from a model whose tasks are the four target languages."""
    output = tmp_path_factory.mktemp("extract") / "part"
    words = f"--directions={','.join(ASKED)}", f"--output={output}", "--sentences=4"
    said = m4("extract", run, *words).ok()
    about = run_folder.read(output)["extracted"]
    assert f"experts 4 -> {about['experts'][1]}, pieces 400 -> {about['pieces'][1]}" in said.out
    for name, score in about["scores"].items():
        before, after = (f"{value:.4f}" for value in score["nll"])
        assert f"{name}, 4 test sentences: nll {before} -> {after}, BLEU" in said.out
    return output


def test_a_part_computes_what_the_whole_model_does(run: Path, part: Path) -> None:
    whole, small = loaded(run), loaded(part)
    assert {*small.trained} == {*ASKED}
    kept = [pieces(whole).index(piece) for piece in pieces(small)]
    assert len(kept) < len(pieces(whole))
    assert {*small.vocabulary.languages} == {"en", "pt", "gl"}
    texts = Cache(next((part / "data").glob("*/manifest.json")).parent)
    for direction, pairs in split_pairs(texts, ASKED, "test").items():
        for source, target in pairs[:3]:
            all_of, one = (logits(model, direction, source, target) for model in (whole, small))
            # Products over fewer columns may add in another order.
            np.testing.assert_allclose(one, all_of[:, kept], rtol=0, atol=1e-5)


def test_the_experts_are_those_that_the_tasks_choose(run: Path, part: Path) -> None:
    about, params = run_folder.read(part)["extracted"], loaded(run).params
    for stack in ("encoder_0", "decoder_0"):
        moe = params[stack]["moe"]
        english = np.asarray(moe["tasks"]["kernel"])[3]  # the fourth target language
        wanted = np.sort(np.argsort(-english @ np.asarray(moe["router"]["kernel"]))[:2])
        assert about["kept"][stack] == wanted.tolist()
    # Both directions have one task: two experts, for the gate chooses two.
    assert about["experts"] == [4, 2]
    small = loaded(part).params
    before, after = about["parameters"]
    assert after == sum(leaf.size for leaf in jax.tree.leaves(small))
    assert about["bytes"] == [4 * before, 4 * after]
    for score in about["scores"].values():
        # The same logits with fewer others: every reference is more probable.
        assert score["nll"][1] < score["nll"][0]
        assert score["sentences"] == 4


@pytest.mark.slow
@pytest.mark.thorough
def test_other_commands_read_a_part(part: Path, tmp_path: Path) -> None:
    said = m4("translate", f"--model_dir={part}", "--from=gl", "--to=en", "tres semanas")
    assert (said.status, len(said.out.splitlines())) == (0, 1), said.err
    mistake = m4("translate", f"--model_dir={part}", "--from=gl", "--to=es", "tres").mistake
    assert "this model does not translate into it. It knows: en" in mistake
    begun = f"--gin_file={part / 'config.gin'}", f"--init_from={part}"
    data = f"--gin.experiment.Data.data_dir='{part / 'data'}'"
    m4("train", *begun, f"--model_dir={tmp_path / 'on'}", data, "--gin.TRAIN_STEPS=1").ok()
    assert run_folder.read(tmp_path / "on")["initial"]["left"] == []
    m4("eval", f"--model_dir={part}", "--sentences=1").ok()


OTHERS = ("base", "mixtral", "noisy_topk", "top2_gshard")  # whose choices' gates sum to 1, too


def made(module: Transformer, params: Any, corpus: Cache) -> Translator:
    return Translator(module, params, corpus.vocabulary, trained=corpus.directions)


@pytest.mark.thorough
@pytest.mark.parametrize("gate", ["deepseek", *OTHERS])
def test_equal_where_no_token_chose_a_removed_expert(
    gate: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus = small_corpus(tmp_path_factory)
    moe = functools.partial(SMALL_MOE, num_experts=8, gate=parts_in(gates)[gate])
    module = model_for(corpus, moe=moe, directions=len(corpus.directions))
    ids = np.ones((1, 2), np.int32)
    params = module.init(jax.random.key(0), ids, ids, ids, enable_dropout=False)["params"]
    # Routers and biases of zeros would choose the first experts always.
    leaves, tree = jax.tree.flatten(dict(params))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(key, x.shape)
             for x, key in zip(leaves, keys, strict=True)]  # fmt: skip
    whole = made(module, jax.tree.unflatten(tree, noisy), corpus)
    pairs = [(word, word) for word in ("a", "red", "blue river", "the tree", "cloud", "12")]
    use = use_of(whole, {"gl-en": pairs[:1]})
    experts = max(int(np.count_nonzero(count_E)) for count_E in use.values())
    assert experts < 8
    chosen = Part(whole, corpus, 0, use, experts, {None: range(len(pieces(whole)))})
    smaller = functools.partial(moe, num_experts=experts)
    module = model_for(corpus, moe=smaller, directions=len(corpus.directions))
    small = made(module, cut(chosen, module, corpus), corpus)
    found = []
    for pair in pairs:
        there = use_of(whole, {"gl-en": [pair]})
        kept = {layer: np.argsort(-count_E, kind="stable")[:experts]
                for layer, count_E in use.items()}  # fmt: skip
        inside = all(np.delete(there[layer], kept[layer]).sum() == 0 for layer in there)
        all_of, one = (logits(model, "gl-en", *pair) for model in (whole, small))
        found.append(inside)
        assert np.allclose(one, all_of, rtol=0, atol=1e-5) == inside, pair
    assert found[0]
    assert not all(found)


@pytest.mark.thorough
def test_directions_that_no_mixture_has_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked = "--directions=gl-en,en-pt", f"--output={tmp_path / 'part'}", "--sentences=2"
    m4("extract", tiny_run(tmp_path_factory), *asked).ok()
    assert {*loaded(tmp_path / "part").trained} == {"gl-en", "en-pt"}


def test_mistakes_are_one_line(
    run: Path, part: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiny, output = tiny_run(tmp_path_factory), f"--output={tmp_path / 'it'}"

    def mistake(*words: object) -> str:
        return m4("extract", *words).mistake

    asked = f"--directions={','.join(ASKED)}"
    assert "--directions: no fr-en; there are en-es" in mistake(
        tiny, "--directions=gl-en,fr-en", output
    )
    assert "is there already" in mistake(run, asked, f"--output={part}")
    assert "--keep=5: must be from 1 to 4" in mistake(tiny, asked, output, "--keep=5")
    assert "--keep=0: must be from 1 to 4" in mistake(tiny, asked, output, "--keep=0")
    assert "--keep_share=1.5: must be above 0" in mistake(tiny, asked, output, "--keep_share=1.5")
    assert "choose 2 experts" in mistake(run, asked, output, "--keep=1")
    assert "must be at least 2 for top2_gshard" in mistake(tiny, asked, output, "--keep=1")
    assert "a folder on this machine" in mistake(tiny, asked, "--output=gs://b/it")
    assert "names no direction" in mistake(tiny, "--directions=,", output)
    dense = mistake(tiny, asked, output, "--gin.transformer.Transformer.moe=None")
    assert "a dense model, which has no experts" in dense
    assert not (tmp_path / "it").exists()
