"""Hash layers: the three tables, a case by hand, a table that comes from the checkpoint."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.cluster.vq import ClusterError

from m4.model.gates.hash import hash, make_table
from m4.model.moe import MoeLayer
from m4.model.routing import Tokens
from m4.model.transformer import Transformer, abstract_variables
from m4.train.program import initialize
from tests.eval.small_model import VOCAB
from tests.model.gates.golden import slots
from tests.shared import small_layer, small_model


def tokens_of(ids, mask, table) -> Tokens:
    def score(name, **_):
        raise AssertionError("there is no router")

    return Tokens(
        score=score, mask_GS=jnp.asarray(mask), ids_GS=jnp.asarray(ids),
        table=lambda name, make: jnp.asarray(table),
    )  # fmt: skip


def test_by_hand():
    # Ids 0 ... 3 live at experts 1, 0, 1, 1; two slots. Expert 1 takes the first token (id 3) and,
    # after padding (id 0) that takes none, the fourth (id 2); the fifth (id 0) finds it full.
    tokens = tokens_of([[3, 1, 0, 2, 0]], [[True, True, False, True, True]], [1, 0, 1, 1])
    routing = jax.device_get(jax.jit(lambda: hash(tokens, 2, slots(2)))())
    assert routing.expert_GSK[0, :, 0].tolist() == [1, 0, 1, 1, 1]
    assert routing.position_GSK[0, :, 0].tolist() == [0, 0, -1, 1, -1]
    assert routing.weight_GSK[0, :, 0].tolist() == [1, 1, 0, 1, 0]
    assert (routing.aux_loss, routing.z_loss) == (0, 0)
    np.testing.assert_allclose(routing.metrics["fraction_tokens_left_behind"], 1 / 4)


def test_random_table():
    table = make_table(8, 10_000, table="random", seed=1)
    # Binomial: 1,250 ids an expert, with a standard deviation of 33; five of them.
    counts = np.bincount(table, minlength=8)
    assert len(counts) == 8
    assert (np.abs(counts - 1250) < 165).all()
    np.testing.assert_array_equal(table, make_table(8, 10_000, table="random", seed=1))
    assert (table != make_table(8, 10_000, table="random", seed=2)).any()


def test_balanced_table_by_hand(tmp_path):
    # By falling count: id 2 (9) to expert 0, id 4 (6) to 1, id 1 (5) to 1 (6 < 9), id 5 (3) to 0
    # (9 < 11), id 0 (2) to 1 (11 < 12). Loads 12 and 13. Id 3 never occurs: to the smaller load.
    np.save(tmp_path / "counts.npy", np.array([2, 5, 9, 0, 6, 3]))
    table = make_table(2, 6, table="balanced", seed=0, counts=str(tmp_path / "counts.npy"))
    assert table.tolist() == [1, 1, 0, 0, 1, 0]
    # A vocabulary that was rounded up, to a multiple of 4 or of 1,024: its last ids never occur.
    for rounded in (8, 1024):
        rows = make_table(2, rounded, table="balanced", seed=0, counts=str(tmp_path / "counts.npy"))
        assert rows[[0, 1, 2, 4, 5]].tolist() == [1, 1, 0, 1, 0]


def test_clustered_table(tmp_path):
    # Three clouds far apart: whatever their names, each has a separate expert.
    rng = np.random.default_rng(0)
    cloud = rng.integers(0, 3, 90)
    cloud[:3] = [0, 1, 2]
    centres = np.array([[10.0, 0.0], [-10.0, 0.0], [0.0, 20.0]])
    path = tmp_path / "e.npy"
    np.save(path, (centres[cloud] + rng.normal(size=(90, 2))).astype(np.float32))
    table = make_table(3, 100, table="clustered", seed=0, embeddings=str(path))
    names = table[:3]
    assert set(names) == {0, 1, 2}
    np.testing.assert_array_equal(table[:90], names[cloud])
    assert ((table >= 0) & (table < 3)).all()


def test_bad_embeddings(tmp_path, monkeypatch):
    for name, rows in (("flat", np.ones(8)), ("alike", np.ones((8, 2))), ("apart", np.eye(8))):
        np.save(tmp_path / f"{name}.npy", rows)

    def make(name):
        path = str(tmp_path / f"{name}.npy")
        return make_table(4, 8, table="clustered", seed=3, embeddings=path)

    with pytest.raises(ValueError, match=r"hash\.embeddings = None: must be the name of an .npy"):
        make_table(4, 8, table="clustered", seed=3)
    with pytest.raises(ValueError, match=r"^hash\.embeddings: no file .*missing\.npy"):
        make("missing")
    with pytest.raises(ValueError, match=r"^hash\.embeddings: .* has the shape \(8,\); .* 8 ids"):
        make("flat")
    with pytest.raises(ValueError, match="1 different rows do not make 4 clusters"):
        make("alike")

    def lose_one(*_, **__):
        raise ClusterError

    # Rare, and another draw has another end.
    monkeypatch.setattr("m4.model.gates.hash.kmeans2", lose_one)
    with pytest.raises(ValueError, match=r"k-means with hash\.seed = 3 leaves one of the 4"):
        make("apart")


def test_bad_counts(tmp_path):
    np.save(tmp_path / "none.npy", np.ones(0, int))
    np.save(tmp_path / "long.npy", np.ones(201, int))
    np.save(tmp_path / "alike.npy", np.ones((200, 2)))
    np.save(tmp_path / "nan.npy", np.full(200, np.nan))
    np.savez(tmp_path / "several.npz", np.ones(200, int))
    (tmp_path / "half.npz").write_bytes((tmp_path / "several.npz").read_bytes()[:100])
    (tmp_path / "text.npy").write_text("1, 2, 3")
    kinds = dict.fromkeys(("text.npy", "nan.npy", "several.npz", "half.npz"), "is not an .npy file")
    kinds |= {"none.npy": r"the shape \(0,\)", "long.npy": r"the shape \(201,\); .* 200 ids"}
    for name, said in (kinds | {"alike.npy": "the shape", "missing.npy": "no file"}).items():
        with pytest.raises(ValueError, match=rf"^hash\.counts: .*{said}"):
            make_table(4, 200, table="balanced", seed=0, counts=str(tmp_path / name))
    with pytest.raises(ValueError, match=r"hash\.counts = None: must be the name of an .npy"):
        make_table(4, 200, table="balanced", seed=0)


def test_the_table_comes_from_the_checkpoint(tmp_path):
    path = tmp_path / "counts.npy"
    np.save(path, np.arange(20))

    def gate(tokens, num_experts, capacity):
        return hash(tokens, num_experts, capacity, table="balanced", counts=str(path))

    layer = small_layer(gate=gate, vocab_size=20)
    rng = np.random.default_rng(0)
    x_BLM = rng.normal(size=(2, 8, 6)).astype(np.float32)
    ids_BL = rng.integers(0, 20, (2, 8))
    inputs = x_BLM, np.ones((2, 8), bool), ids_BL
    init = jax.jit(lambda key: layer.init(key, *inputs, deterministic=True))
    params: Any = jax.device_get(init(jax.random.key(0))["params"])
    made = make_table(4, 20, table="balanced", seed=0, counts=str(path))
    np.testing.assert_array_equal(params["hash"]["table"], made)
    assert "router" not in params
    path.unlink()
    make_table.cache_clear()

    @jax.jit
    def outputs(params) -> Any:
        return layer.apply({"params": params}, *inputs, deterministic=True)

    # Each token is the work of one expert, the one that the parameter says: by the definition.
    for table in (made, (made + 1) % 4):
        y_BLM = outputs({**params, "hash": {"table": jnp.asarray(table, jnp.float32)}})
        wi_EMF, wo_EFM = (params["experts"][name]["kernel"] for name in ("wi", "wo"))
        chosen_BL = table[ids_BL]
        h_BLF = np.maximum(np.einsum("BLM,BLMF->BLF", x_BLM, wi_EMF[chosen_BL]), 0)
        expected = np.einsum("BLF,BLFM->BLM", h_BLF, wo_EFM[chosen_BL])
        np.testing.assert_allclose(y_BLM, expected, atol=1e-5)


def model_of(gate) -> Transformer:
    # A scan's body is traced by itself, and again where it is computed again.
    return small_model(
        vocab_size=VOCAB, encoder_layers=2, scan_layers=True, remat="full",
        moe=functools.partial(MoeLayer, num_experts=4, gate=gate),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"table": "balanced", "counts": "none.npy"}, {"table": "clustered", "embeddings": "none.npy"}],
)
def test_shapes_need_no_file_and_tables_do(options):
    model = model_of(functools.partial(hash, **options))
    shapes = abstract_variables(model)["params"]
    shape = shapes["encoder_blocks"]["layer_0"]["moe"]["hash"]["table"].shape
    assert shape == (2, VOCAB), "of both blocks"
    with pytest.raises(ValueError, match=r"^hash\.\w+: no file none\.npy"):
        jax.eval_shape(lambda: initialize(model, optax.sgd(0.1), seed=0))
