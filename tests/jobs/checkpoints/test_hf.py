"""Pretrained models in Hugging Face's layout: read with equal logits, from T5 to Switch."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import unflatten_dict

from m4 import config
from m4.build import model_of
from m4.data.cache.cache import Cache
from m4.eval.decoding.search import search
from m4.experiment import identity
from m4.jobs.checkpoints.initial import SourceHf
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.parallel.mesh import make_mesh
from m4.settings import InputError
from m4.storage import safetensors
from m4.storage.checkpoints import by_path
from m4.storage.safetensors import Weights
from m4.train import initial
from m4.train.initial import Rows
from tests.command_line import m4
from tests.damage import damaged_json, refused
from tests.documents.world import write_corpus
from tests.jobs.checkpoints.test_initial import saved, train
from tests.train.trainers import program_of

HF = Path(__file__).parents[2] / "testdata" / "hf"
NAMES = ("t5_1_0", "t5_1_1", "mt5", "madlad", "umt5", "switch")
SWITCH_OR_CI = [pytest.param(n, marks=() if n == "switch" else pytest.mark.thorough) for n in NAMES]


@functools.cache
def source(name: str) -> SourceHf:
    return SourceHf(HF / name)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """Returns transformers' numbers in m4's ids; decoders start with 0, the start's new row."""
    with np.load(HF / name / "golden.npz") as file:
        found = {key: file[key] for key in file}
    old_ids = source(name).vocabulary().old_ids
    for key in ("inputs", "targets", "greedy", "beam4", "decoder_inputs"):
        found[key] = np.argsort(old_ids)[found[key]].astype(np.int32)
    for key in ("decoder_inputs", "greedy", "beam4"):
        found[key][:, 0] = 0
    return {**found, "logits": found["logits"][:, :, old_ids]}


def begun(name: str, transformer: Transformer, **mesh: int) -> Any:
    """Returns the parameters of a model that begins from a folder, over a mesh."""
    there = source(name)
    devices = jax.devices() if mesh else jax.devices()[:1]
    program = program_of(
        transformer, make_mesh(devices=devices, **mesh), optax.identity(), batch_size=8
    )
    rows = Rows(np.arange(there.vocabulary().size, dtype=np.int32), {})
    plan = initial.plan(there.shapes, transformer, None, lambda _: rows)
    initial.check_computation(transformer, there.computation, there.folder)
    there.check_left(plan.unused())
    return there.begin(program, plan).params


def logits(model: Transformer, params: Any, given: dict[str, np.ndarray]) -> np.ndarray:
    """Returns [N, V] logits of real targets; at padding, no experts are computed."""
    apply = jax.jit(functools.partial(model.apply, enable_dropout=False))
    inputs = (jnp.asarray(given[key]) for key in ("inputs", "decoder_inputs", "targets"))
    return np.asarray(apply({"params": params}, *inputs))[given["targets"] > 0]


def check_logits(name: str, model: Transformer, params: Any) -> None:
    wanted = golden(name)
    got_NV, wanted_NV = logits(model, params, wanted), wanted["logits"][wanted["targets"] > 0]
    # A vocabulary that has grown has more.
    got_NV = got_NV[:, : wanted_NV.shape[1]]
    np.testing.assert_allclose(got_NV, wanted_NV, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_searches_are_those_of_transformers(name: str) -> None:
    model, wanted = source(name).model, golden(name)
    params = begun(name, model)
    check_logits(name, model, params)
    batch = {"encoder_input_tokens": wanted["inputs"]}
    # No translation ends before its 12 tokens, so the penalty of the length changes nothing.
    for beams, tokens_BT in ((1, wanted["greedy"][:, 1:]), (4, wanted["beam4"][:, 1:])):
        made_BKT, _ = search(model, params, batch, tokens_BT.shape[1], beams, 1.0)
        np.testing.assert_array_equal(made_BKT[:, 0], tokens_BT)


EXPERTS = functools.partial(MoeLayer, num_experts=4)  # GShard's gates, which sum to 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCH_OR_CI)
def test_logits_scanned_with_experts_and_on_eight_devices(name: str) -> None:
    """A Switch Transformer has experts of its own."""
    model = source(name).model
    if model.moe is None:
        check_logits(name, moe := model.clone(moe=EXPERTS), begun(name, moe))
    scanned = model.clone(scan_layers=True)
    check_logits(name, scanned, begun(name, scanned))
    params = begun(name, scanned, expert=2, model=2)
    assert len(params["token_embedder"]["embedding"].sharding.device_set) == 8
    check_logits(name, scanned, jax.device_get(params))


def config_of(folder: Path, place: Path) -> Path:
    """Returns the gin file that `m4 checkpoint inspect` writes."""
    m4("checkpoint", "inspect", folder, f"--output={place}").ok()
    assert m4("checkpoint", "inspect", folder).out == place.read_text()
    assert "is there already" in m4("checkpoint", "inspect", folder, f"--output={place}").mistake
    return place


def test_a_run_begins_where_inspect_says_and_its_tags_are_used(tmp_path: Path) -> None:
    """MADLAD's ids are others: start and unk 0, pad 1, eos 2; it has <2gl>, and no tag of es."""
    there = HF / "madlad"
    gin = config_of(there, tmp_path / "madlad.gin")
    assert "# ids: pad 1, eos 2, start 0 -> 0, 1 and 0 in m4" in gin.read_text()
    run = tmp_path / "run"
    said = train(run, f"--gin_file={gin}", "--gin.TRAIN_STEPS=0").ok()
    assert "52 of 52 arrays of parameters are taken over" in said.out
    vocabulary = Cache(run / "vocabulary").source_vocabulary
    pieces = source("madlad").vocabulary().pieces
    assert vocabulary.pieces[:320] == pieces
    assert pieces[:5] == ["<pad>", "</s>", "<unk>", "<2en>", "<2gl>"]
    assert vocabulary.tag_id("gl") == 4
    assert vocabulary.tag_id("es") >= 320
    assert vocabulary.encode_tagged(["<2gl> three"])[0][0] == 4
    params = saved(run)
    grown = source("madlad").model.clone(vocab_size=params["token_embedder"]["embedding"].shape[0])
    check_logits("madlad", grown, params)
    # es and pt have no tags.
    small = train(
        tmp_path / "no", f"--gin_file={gin}", "--gin.corpus.CorpusSpec.vocabulary_size=320"
    )
    assert "has 320 pieces and needs 2 more tags: at least 322" in small.mistake
    for more, mistake in (
        ("--keep_optimizer", "has no state of an optimizer"),
        ("--gin.initial.InitialModel.vocabulary='mine.model'", "has its own"),
        (f"--init_from={there}@4", "which has no steps"),
    ):
        assert mistake in train(tmp_path / "no", f"--gin_file={gin}", more).mistake
    tied = "--gin.transformer.Transformer.tied_logits=True"
    other = train(tmp_path / "no", f"--gin_file={gin}", tied)
    assert "tied_logits = True: must be False, as in " in other.mistake


def test_bilingual_models_keep_their_recipe(tmp_path: Path) -> None:
    """The gin file of `inspect`, beside that of `m4 new`, sets the shared model alone."""
    write_corpus(tmp_path / "corpus")
    pairs = tmp_path / "pairs.gin"
    m4("new", tmp_path / "corpus", f"--out={pairs}", "--yes").ok()
    both = [pairs, config_of(HF / "mt5", tmp_path / "mt5.gin")]
    models, optimizers = set(), set()
    for files in ([pairs], both):
        baselines = config.load(files).experiment().baselines
        assert baselines is not None
        baseline = baselines.low
        made = model_of(baseline, {"vocab_size": 300}, 2)
        # Those of real models are T5's.
        models.add(made.clone(relative_buckets=32, relative_distance=128))
        optimizers.add(json.dumps(identity(baseline.training.optimizer)))
    assert len(models) == len(optimizers) == 1


def test_shards_of_bfloat16_are_read_one_by_one(tmp_path: Path) -> None:
    there, folder = source("mt5"), copied("mt5", tmp_path)
    (folder / "model.safetensors").unlink()
    names = sorted(there.weights.files)
    index = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in {*index.values()}:
        mine = {n: there.weights.read(n).astype(jnp.bfloat16) for n in names if index[n] == file}
        safetensors.write(folder / file, mine, {})
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": index}))
    made = SourceHf(folder)
    assert made.weights.dtypes == {"BF16"}
    for path in made.shapes:
        got = made.read(path)
        assert got.dtype == np.float32
        # bfloat16 keeps 8 bits of a number.
        np.testing.assert_allclose(got, there.read(path), rtol=2**-8)
    (folder / "model-00002-of-00002.safetensors").unlink()
    missing = "names model-00002-of-00002.safetensors, which is not in the folder"
    assert missing in m4("checkpoint", "inspect", folder).mistake


def copied(name: str, into: Path) -> Path:
    return Path(shutil.copytree(HF / name, into / name))


def configured(**changes: Any) -> Callable[[Path], None]:
    """Returns a function that changes config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def stored(**arrays: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Returns a function that changes arrays, or drops those that become None; "__" is a dot."""

    def change(folder: Path) -> None:
        weights = Weights(folder)
        found = {name: weights.read(name) for name in weights.files}
        for name, changed in arrays.items():
            at = name.replace("__", ".")
            found[at] = changed(found.get(at, found["shared.weight"]))
        kept = {name: array for name, array in found.items() if array is not None}
        safetensors.write(folder / "model.safetensors", kept, {})

    return change


def with_tokenizer_json(folder: Path) -> None:
    (folder / "spiece.model").rename(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "damage", "mistake"),
    [
        ("mt5", lambda f: (f / "spiece.model").unlink(), "has no SentencePiece model (spiece"),
        ("mt5", with_tokenizer_json, "and tokenizer.json alone is none"),
        ("mt5", configured(d_ff=65), "wi_0.weight is [64, 32], and config.json asks"),
        ("mt5", configured(num_layers=3), "the files have no encoder.block.2."),
        ("mt5", configured(num_layers=1), "SelfAttention.k.weight [32, 32] is none that"),
        ("mt5", configured(vocab_size=319), "is [320, 32], and config.json asks for [319, 32]"),
        ("mt5", configured(d_model="32"), "d_model = '32': must be a whole number"),
        ("mt5", configured(eos_token_id=2), "pad and eos are 0, 2 in config.json and 0, 1 in"),
        ("mt5", configured(feed_forward_proj="gelu"), "_proj = 'gelu': must be one of"),
        ("mt5", configured(layer_norm_epsilon=1e-5), "must be 1e-06"),
        ("mt5", configured(tie_word_embeddings=True), "lm_head.weight that is not shared.weight"),
        ("mt5", stored(lm_head__weight=lambda x: None), "files have no lm_head.weight: must be"),
        ("mt5", stored(shared__weight=lambda x: x.astype(np.int8)), "of type I8: must be F32"),
        ("mt5", stored(more=lambda x: x), "more [320, 32] is none that m4's model has"),
        ("switch", configured(decoder_sparse_step=1), "must be both 1, or both 2"),
        ("mt5", configured(model_type="m2m_100"), "sinusoidal positions and no relative ones "),
        ("mt5", configured(model_type="marian"), "(Marian, OPUS-MT), which m4's model has not"),
        ("mt5", configured(model_type="bart"), "learned positions (BART)"),
        ("mt5", configured(model_type="longt5"), "must be one of T5's family (t5, mt5, umt5"),
        ("mt5", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "is a pickle"),
        ("mt5", lambda f: (f / "config.json").write_text("[]"), "json: damaged (not a JSON object"),
        ("mt5", configured(d_model=10**9), "d_model = 1000000000: the files are smaller"),
        ("mt5", lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "read as safetensors"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(
    name: str, damage: Callable[[Path], Any], mistake: str, tmp_path: Path
) -> None:
    folder = copied(name, tmp_path)
    damage(folder)
    assert mistake in (said := m4("checkpoint", "inspect", folder).mistake)
    assert str(folder) in said


@pytest.mark.parametrize("name", ["config.json", safetensors.INDEX])
def test_whatever_is_damaged_in_a_file_of_json_is_one_line(name: str, tmp_path: Path) -> None:
    folder = copied("switch", tmp_path)
    there = source("switch").weights.files
    index = {"metadata": {}, "weight_map": {one: path.name for one, path in there.items()}}
    (folder / safetensors.INDEX).write_text(json.dumps(index))
    text = (folder / name).read_text()
    times = 0
    for damaged in damaged_json(text):
        (folder / name).write_bytes(damaged)
        times += refused(lambda: SourceHf(folder), str(folder))
    assert times >= 10
    for out in ("../model.safetensors", "/etc/passwd", ""):
        index["weight_map"]["shared.weight"] = out
        (folder / safetensors.INDEX).write_text(json.dumps(index))
        assert refused(lambda: SourceHf(folder), str(folder))


def test_a_table_may_have_copies_and_names_that_nothing_reads(tmp_path: Path) -> None:
    folder = copied("t5_1_0", tmp_path)
    bias = "decoder__block__0__layer__1__EncDecAttention__relative_attention_bias__weight"
    names = ("lm_head__weight", "encoder__embed_tokens__weight", bias)
    stored(**dict.fromkeys(names, lambda x: x))(folder)
    assert SourceHf(folder).shapes == source("t5_1_0").shapes
    stored(shared__weight=lambda x: x * np.inf, lm_head__weight=lambda x: None)(folder)
    with pytest.raises(InputError, match="has 10,240 values that are not finite"):
        SourceHf(folder)  # compares copies


# ------------------------------------------------------------------------------------ and back

# Numbers are multiplied by √M = 4 and divided by √D = 2, so exactly.
EXACT = ("--gin.transformer.Transformer.head_width=4", "--gin.TRAIN_STEPS=0")
SWITCH = (
    "--gin_bindings=from m4.model.gates import switch",
    "--gin.moe.MoeLayer.gate=@switch.switch",
)
DENSE = "--gin.transformer.Transformer.moe=None"
KINDS = {
    "T5ForConditionalGeneration": (
        DENSE, "--gin.transformer.Transformer.activations=('gelu', 'linear')",
        "--gin.transformer.Transformer.tied_logits=False",
    ),
    "UMT5ForConditionalGeneration": (
        DENSE, "--gin.transformer.Transformer.relative_bias='every_layer'"
    ),
    "SwitchTransformersForConditionalGeneration": SWITCH,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_export_and_back_is_bit_equal(kind: str, tmp_path: Path) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    train(run, *EXACT, *KINDS[kind]).ok()
    said = m4("export", run, "--format=hf", f"--output={exported}").ok()
    assert kind in said.out
    assert "is there already" in m4("export", run, "--format=hf", f"--output={exported}").mistake
    there, params = SourceHf(exported), saved(run)
    flat = by_path(params)
    assert there.shapes == {path: array.shape for path, array in flat.items()}
    assert all(np.array_equal(there.read(path), flat[path]) for path in flat)

    again = tmp_path / "again"
    from_there = f"--gin.corpus.CorpusSpec.vocabulary_from={str(exported)!r}"
    train(again, *EXACT, *KINDS[kind], f"--init_from={exported}", from_there).ok()
    assert jax.tree.all(jax.tree.map(np.array_equal, params, saved(again)))


def exported_run(kind: str, folder: Path) -> Path:
    """Exports a run whose table has only rows with pieces, as CTranslate2 needs."""
    rows = "--gin.experiment.Experiment.vocabulary_multiple=1"
    train(folder / "run", rows, *EXACT, *KINDS[kind]).ok()
    place = folder / "exported"
    m4("export", folder / "run", "--format=hf", f"--output={place}").ok()
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same(kind: str, tmp_path: Path) -> None:
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    exported = exported_run(kind, tmp_path)
    there, theirs = SourceHf(exported), getattr(transformers, kind).from_pretrained(exported).eval()
    given = {key: value for key, value in golden("mt5").items() if key != "logits"}
    mask = given["inputs"] > 0
    with torch.no_grad():
        found = theirs(
            input_ids=torch.tensor(given["inputs"]).long(),
            attention_mask=torch.tensor(mask).long(),
            decoder_input_ids=torch.tensor(given["decoder_inputs"]).long(),
        ).logits.numpy()
    got = logits(there.model, unflattened(there), given)
    np.testing.assert_allclose(got, found[given["targets"] > 0], rtol=0, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The sentencepiece tokenizer")
def test_ctranslate2_takes_the_folder(tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    transformers = pytest.importorskip("transformers")
    kind = "T5ForConditionalGeneration"
    exported = exported_run(kind, tmp_path)
    place = str(tmp_path / "ct2")
    ctranslate2.converters.TransformersConverter(str(exported)).convert(place)
    tokenizer = transformers.T5Tokenizer.from_pretrained(exported)
    source = tokenizer("<2gl> three birds", return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(source["input_ids"][0])
    (found,) = ctranslate2.Translator(place).translate_batch(
        [tokens], beam_size=1, max_decoding_length=8
    )
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(exported)
    ids = theirs.generate(**source, max_new_tokens=8)[0, 1:]
    assert found.hypotheses[0] == tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ((), "experts with the gate top2_gshard"),
        ((DENSE, "--gin.transformer.Transformer.absolute_positions=True"), "absolute positions"),
    ],
)  # fmt: skip
def test_what_hugging_face_has_not_is_not_exported(
    more: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    train(run, "--gin.TRAIN_STEPS=0", *more).ok()
    said = m4("export", run, "--format=hf", f"--output={exported}")
    assert f"{run}: it has {why}" in said.mistake
    assert "which Hugging Face's T5 has not" in said.mistake
    assert not exported.exists()
    other = m4("export", HF / "mt5", "--format=hf", f"--output={exported}")
    assert "run.json" in other.mistake


# ---------------------------------------------------------------------------------------- trim


@pytest.mark.parametrize("name", ["mt5", "madlad"])
def test_trim_keeps_logits_and_segmentations(name: str, tmp_path: Path) -> None:
    corpus, output = tmp_path / "corpus", tmp_path / "trimmed"
    lines = ["Montag\tMonday", "three weeks ago", "Galicia\tGaliza"]
    corpus.mkdir()
    (corpus / "gl.train.tsv").write_text("\n".join(lines))
    said = m4("checkpoint", "trim", HF / name, f"--corpus={corpus}", f"--output={output}").ok()
    small, large = SourceHf(output), source(name)
    old, new = large.vocabulary(), small.vocabulary()
    assert f"{output}: 320 -> {new.size} rows, 0." in said.out
    assert new.size < 100
    assert new.languages == old.languages  # tags stay
    assert {"<pad>", "</s>", "<unk>"} <= {*new.pieces}
    kept = [old.pieces.index(piece) for piece in new.pieces]
    for text in "\t".join(lines).split("\t"):
        assert [kept[i] for i in new.encode([text])[0]] == old.encode([text])[0]
    given = {key: value for key, value in golden(name).items() if key != "logits"}
    ids = np.asarray(sorted(set(range(new.size)) - {2}))  # ids of kept pieces
    short = {key: ids[value % len(ids)].astype(np.int32) for key, value in given.items()}
    for key, value in given.items():
        short[key] = np.where(value > 0, short[key], 0)
    long = {key: np.asarray(kept, np.int32)[value] for key, value in short.items()}
    one, all_of = (
        logits(each.model, unflattened(each), given)
        for each, given in ((small, short), (large, long))
    )
    # Products over fewer columns may add in another order.
    np.testing.assert_allclose(one, all_of[:, kept], rtol=0, atol=1e-5)
    again = m4("checkpoint", "trim", HF / name, f"--corpus={corpus}", f"--output={output}")
    assert "is there already" in again.mistake


def unflattened(there: SourceHf) -> Any:
    return unflatten_dict({path: there.read(path) for path in there.shapes}, sep="/")


def test_trim_asks_for_what_it_needs(tmp_path: Path) -> None:
    corpus, output = f"--corpus={tmp_path}", f"--output={tmp_path / 'it'}"

    def mistake(what: str, *words: str) -> str:
        return m4("checkpoint", what, HF / "mt5", *words).mistake

    assert "--corpus: must be given" in mistake("trim", output)
    assert "must be a text file, or a folder of such" in mistake("trim", corpus, output)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    assert "a.txt line 1: not UTF-8" in mistake("trim", corpus, output)
    (tmp_path / "a.txt").write_text("")
    assert "has none of the pieces of" in mistake("trim", corpus, output)
    assert "only with trim, not inspect" in mistake("inspect", corpus)
