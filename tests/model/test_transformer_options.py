"""What a model may be made of: options that are refused, and the sizes of its experts."""

from functools import partial

import pytest

from m4.model.gates.switch import switch
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.moe import MoeLayer
from m4.settings import SettingError
from tests.model.test_transformer import tiny


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *[("width", x) for x in (0, -1, True, 1.5, "x", "", None, 10**12)],
        *[("heads", x) for x in (0, 10**12)],
        *[("encoder_layers", x) for x in (0, -1, 10**12)],
        ("decoder_layers", -1),
        ("moe_every", 1.5),
        ("pipeline_microbatches", -1),
        ("dropout_rate", 1.0),
        ("remat", "some"),
        ("scan_layers", 1),
        *[("activations", x) for x in (("swash",), ())],
        *[("dtype", x) for x in (0, "int8", None)],
        ("source_vocab_size", 0),
    ],
)
def test_options_that_cannot_be_are_refused_when_the_model_is_made(option, wrong):
    with pytest.raises(SettingError) as error:
        tiny(**{option: wrong})
    assert error.value.setting == f"Transformer.{option}"


def test_sinusoids_come_in_pairs():
    with pytest.raises(SettingError, match=r"^Transformer\.width = 7: must be even"):
        tiny(width=7, absolute_positions=True)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"moe_every": 0}, "Transformer.moe_every"),
        ({"moe_every": 3}, "Transformer.moe_every"),  # of two layers: no layer would have experts
        ({"moe": MoeLayer(num_experts=4)}, "Transformer.moe"),
        ({"moe": 8}, "Transformer.moe"),
        ({"decoder_moe": partial(MoeLayer, num_experts=2)}, "Transformer.decoder_moe"),
    ],
)
def test_experts_that_cannot_be_are_refused_when_the_model_is_made(options, setting):
    with pytest.raises(SettingError) as error:
        tiny(**options)
    assert error.value.setting == setting


def test_a_layer_of_experts_has_the_models_sizes_but_its_own_where_they_are_given():
    own = tiny(moe=partial(MoeLayer, 4, 20, activations=["silu", "linear"], dropout_rate=0.5))
    for model, sizes in ((tiny(), (12, ("relu",), 0.1)), (own, (20, ("silu", "linear"), 0.5))):
        layer = model.encoder_experts
        assert layer is not None
        assert (layer.mlp_width, layer.activations, layer.dropout_rate) == sizes
    assert tiny(moe=None).encoder_experts is None
    # A model of the same options is the same key of jit's cache.
    assert hash(tiny()) == hash(tiny())
    assert tiny() == tiny() != own


def test_the_decoder_has_separate_experts_where_they_are_given():
    model = tiny(decoder_moe=partial(MoeLayer, num_experts=4, gate=switch))
    encoder, decoder = model.encoder_experts, model.decoder_experts
    assert encoder is not None
    assert decoder is not None
    assert (encoder.gate, decoder.gate) == (top2_gshard, switch)
    assert (encoder.causal, decoder.causal) == (False, True)
