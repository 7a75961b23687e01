"""A T5X user's model in m4, and m4's in T5X: `m4 export`, `--init_from` of T5X's checkpoints."""

import io
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece

from m4.data.cache.cache import Cache
from m4.storage.t5x import T5xCheckpoint
from tests import t5x_files
from tests.command_line import m4
from tests.jobs.checkpoints.test_initial import saved, train

# So wide that both T5X and m4 factor the moments of every matrix, with D = 64 and M = F.
WIDE = (
    "--gin.transformer.Transformer.width=128", "--gin.transformer.Transformer.mlp_width=128",
    "--gin.transformer.Transformer.head_width=64",
    "--gin.experiment.Training.optimizer=@optimizer.adafactor",
    "--gin.optimizer.adafactor.schedule=@schedules.rsqrt",
)  # fmt: skip
# What T5 1.1 and mT5 are, in the sizes of `t5x_files.t5_parameters`: T5's numbers times 2 (√D) and
# 1/4 (1/√M), so exactly.
T5 = (
    "--gin.transformer.Transformer.head_width=4", "--gin.transformer.Transformer.encoder_layers=2",
    "--gin.transformer.Transformer.decoder_layers=2",
    "--gin.transformer.Transformer.activations=('gelu', 'linear')",
    "--gin.transformer.Transformer.tied_logits=False",
)  # fmt: skip
EQUAL = "--gin.initial.InitialModel.optimizer=True"


def arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    found = T5xCheckpoint(checkpoint)
    return {name: found.read(name) for name in found.shapes}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@pytest.mark.slow
def test_export_and_back_is_bit_equal(tmp_path: Path) -> None:
    """Parameters, Adafactor's moments and its steps, of a model with experts."""
    run, exported, there = tmp_path / "run", tmp_path / "exported", tmp_path / "there"
    train(run, *WIDE, "--gin.TRAIN_STEPS=2").ok()
    said = m4("export", run, "--format=t5x", f"--output={exported}").ok()
    assert "checkpoint_2, with Adafactor's state" in said.out
    assert {path.name for path in exported.iterdir()} == {"checkpoint_2", "vocabulary.model"}
    assert "is there already" in m4("export", run, "--format=t5x", f"--output={exported}").mistake
    written = arrays(exported / "checkpoint_2")
    experts = "target/encoder_0/moe/experts/wi/kernel"
    assert np.array_equal(
        written[experts], saved(run)["encoder_0"]["moe"]["experts"]["wi"]["kernel"]
    )
    moment = "state/param_states/encoder_0/moe/experts/wi/kernel"
    assert {written[f"{moment}/{name}"].shape for name in ("v_row", "v_col")} == {(4, 128)}

    train(there, *WIDE, f"--init_from={exported}", EQUAL, "--gin.TRAIN_STEPS=2").ok()
    for item in ("params", "optimizer"):
        before, now = saved(run, item=item), saved(there, item=item)
        assert jax.tree.all(jax.tree.map(np.array_equal, before, now)), item
    m4("export", there, "--format=t5x", f"--output={tmp_path / 'again'}").ok()
    assert equal(arrays(tmp_path / "again" / "checkpoint_2"), written)


def test_a_run_without_adafactor_is_exported_without_state(first: Path, tmp_path: Path) -> None:
    said = m4("export", first, "--format=t5x", f"--output={tmp_path / 'it'}", "--step=2")
    assert "without an optimizer's state (its optimizer is no Adafactor)" in said.out
    names = arrays(tmp_path / "it" / "checkpoint_2")
    assert not [name for name in names if name.startswith("state/param_states")]
    missing = m4("export", first, "--format=t5x", f"--output={tmp_path / 'no'}", "--step=3")
    assert "no checkpoint of step 3" in missing.mistake
    assert not (tmp_path / "no").exists()


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a unigram model with T5's special ids and, like T5's own, without pieces of bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            f"{word} {number} weeks ago in the year {number * 7}"
            for number in range(60)
            for word in ("hace", "fai", "há", "three birds <2")
        ),
        model_writer=model, vocab_size=60, model_type="unigram", pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("t5") / "spiece.model"
    path.write_bytes(model.getvalue())
    return path


def begins(checkpoint: Path, pieces: Path, *more: str) -> tuple[str, ...]:
    return (
        *T5, f"--init_from={checkpoint}", "--gin.TRAIN_STEPS=0",
        f"--gin.corpus.CorpusSpec.vocabulary_from={str(pieces)!r}",
        f"--gin.initial.InitialModel.vocabulary={str(pieces)!r}",
        "--gin.initial.InitialModel.new_pieces='pieces'", *more,
    )  # fmt: skip


def test_a_public_t5_becomes_dense_and_experts(tmp_path: Path, pieces: Path) -> None:
    size = sentencepiece.SentencePieceProcessor(model_file=str(pieces)).get_piece_size()
    parameters = t5x_files.t5_parameters(rows=size + 28)  # T5's table is larger, too
    place = t5x_files.write(tmp_path / "t5", 1000, t5x_files.targets(parameters), "gcs")
    dense = tmp_path / "dense"
    said = train(dense, *begins(place, pieces, "--gin.transformer.Transformer.moe=None")).ok()
    assert "begins from " in said.out
    assert "at step 1000" in said.out
    now = saved(dense)
    table = parameters["token_embedder/embedding"]
    assert np.array_equal(now["token_embedder"]["embedding"][:size], table[:size] / 4)
    assert np.array_equal(
        now["logits_dense"]["kernel"][:, :size], parameters["decoder/logits_dense/kernel"][:, :size]
    )
    query = parameters["decoder/layers_1/encoder_decoder_attention/query/kernel"]
    assert np.array_equal(
        now["decoder_1"]["encoder_decoder_attention"]["query"]["kernel"], 2 * query
    )
    # T5's ids stay, m4's tags and pieces of the new text come behind them.
    vocabulary = Cache(dense / "vocabulary").source_vocabulary
    old = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    assert vocabulary.pieces[:size] == [old.id_to_piece(i) for i in range(size)]
    assert vocabulary.tag_id("gl") >= size
    assert np.isfinite(now["token_embedder"]["embedding"]).all()

    scanned = t5x_files.targets(t5x_files.scanned(parameters))
    place = t5x_files.write(tmp_path / "scanned", 1000, scanned)
    said = train(tmp_path / "experts", *begins(place.parent, pieces)).ok()
    assert "upcycled: 12 (" in said.out
    wo = saved(tmp_path / "experts")["decoder_0"]["moe"]["experts"]["wo"]["kernel"]
    assert all(np.array_equal(one, parameters["decoder/layers_0/mlp/wo/kernel"]) for one in wo)


def test_what_cannot_be_taken_over_is_one_line(tmp_path: Path, pieces: Path) -> None:
    parameters = t5x_files.targets(t5x_files.t5_parameters(rows=90))
    place = t5x_files.write(tmp_path / "t5", 7, parameters)
    t5x_files.write(
        tmp_path / "t5", 9, parameters | {"target/encoder/layers_0/x/kernel": np.ones(3)}
    )
    for number, (more, mistake) in enumerate((
        (("--gin.transformer.Transformer.width=32",), "is [32, 8] here and [16, 8] in"),
        (("--gin.initial.InitialModel.vocabulary=None",), "must be the SentencePiece model that"),
        ((EQUAL,), "has no state of an optimizer"),
        ((f"--init_from={tmp_path / 't5'}@8",), "no checkpoint of step 8; there are 7, 9"),
        ((f"--init_from={tmp_path / 't5'}",), "encoder/layers_0/x/kernel [3] is none that m4's"),
        (("--gin.corpus.CorpusSpec.target_vocabulary_size=400",), "source_token_embedder"),
    )):  # fmt: skip
        dense = "--gin.transformer.Transformer.moe=None"
        said = train(tmp_path / str(number), *begins(place, pieces, dense, *more))
        assert mistake in said.mistake, (more, said.mistake)
        assert not (tmp_path / str(number) / "checkpoints").exists()
    name = "target/decoder/layers_0/mlp/wo/kernel"
    for number, (wrong, mistake) in enumerate((
        (parameters[name].astype(np.int32), "has numbers of type int32: must be floats"),
        (np.full_like(parameters[name], np.nan), "values that are not finite"),
    )):  # fmt: skip
        other = t5x_files.write(tmp_path / f"wrong{number}", 7, parameters | {name: wrong})
        said = train(tmp_path / f"new{number}", *begins(other, pieces, dense))
        assert f"{other}: {name} {mistake}" in said.mistake.replace(f"has {wrong.size:,} ", "")
    said = train(
        tmp_path / "bytes",
        *begins(place, pieces, "--gin.initial.InitialModel.new_pieces='bytes'"),
        "--gin.transformer.Transformer.moe=None",
    )
    assert "has no pieces for bytes" in said.mistake
