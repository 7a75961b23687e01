"""Converts configs, names and numbers of Hugging Face's T5 family to m4's, and back.

`FAMILIES` has what differs between the architectures, `_LAYERS` and `_OUTSIDE` the names. Numbers
differ as T5X's do
(`m4.train.t5x_layout.t5_factor`), and matrices are transposed: PyTorch has [out, in].
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from m4.model.transformer import Transformer
from m4.settings import InputError
from m4.train.t5x_layout import t5_factor

Config = Mapping[str, Any]


class Family(NamedTuple):
    """One architecture: its class, and the defaults that its config.json may leave out."""

    architecture: str
    tied: bool
    projection: str
    relative_bias: str = "shared"
    experts: bool = False


_SWITCH = "SwitchTransformersForConditionalGeneration"
FAMILIES = {
    "t5": Family("T5ForConditionalGeneration", True, "relu"),
    "mt5": Family("MT5ForConditionalGeneration", False, "gated-gelu"),
    "umt5": Family("UMT5ForConditionalGeneration", True, "gated-gelu", "every_layer"),
    "switch_transformers": Family(_SWITCH, True, "relu", experts=True),
}
# Other architectures that a user may try, and what m4's model lacks for them.
_OTHERS = {
    "m2m_100": "biases, sinusoidal positions and no relative ones (M2M100, NLLB-200)",
    "nllb-moe": "biases and sinusoidal positions (NLLB's mixture of experts)",
    "marian": "biases, norms after the layers and sinusoidal positions (Marian, OPUS-MT)",
    "bart": "biases, norms after the layers and learned positions (BART)",
    "mbart": "biases and learned positions (mBART)",
}
# feed_forward_proj -> m4's activations. Plain "gelu" is another function than T5's approximation.
ACTIVATIONS = {
    "relu": ("relu",),
    "gated-gelu": ("gelu", "linear"),
    "gated-gelu_new": ("gelu", "linear"),
    "gated-silu": ("silu", "linear"),
}
# m4's setting -> key of config.json.
SIZES = {
    "vocab_size": "vocab_size", "width": "d_model", "heads": "num_heads", "head_width": "d_kv",
    "mlp_width": "d_ff", "encoder_layers": "num_layers", "decoder_layers": "num_decoder_layers",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_distance": "relative_attention_max_distance",
}  # fmt: skip
_DEFAULTS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
_LARGEST = 2**31 - 1  # largest 32-bit index
IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}

# m4's name of an attention layer or its norm -> Hugging Face's, and the number of the feed-forward
# layer, by stack.
_SELF, _NORM = "layer.0.SelfAttention", "layer.0.layer_norm"
_LAYERS = {
    "encoder": ({"attention": _SELF, "pre_attention_layer_norm": _NORM}, 1),
    "decoder": ({"self_attention": _SELF, "pre_self_attention_layer_norm": _NORM,
                 "encoder_decoder_attention": "layer.1.EncDecAttention",
                 "pre_cross_attention_layer_norm": "layer.1.layer_norm"}, 2),
}  # fmt: skip
_INSIDE = {
    "scale": "", "rel_embedding": ".relative_attention_bias", "router": ".mlp.router.classifier",
    "query": ".q", "key": ".k", "value": ".v", "out": ".o",
}  # fmt: skip
_BIAS = f"{_SELF}.relative_attention_bias.weight"
_OUTSIDE = {
    "token_embedder/embedding": "shared.weight",
    "logits_dense/kernel": "lm_head.weight",
    "encoder_bias/rel_embedding": f"encoder.block.0.{_BIAS}",
    "decoder_bias/rel_embedding": f"decoder.block.0.{_BIAS}",
    "encoder_norm/scale": "encoder.final_layer_norm.weight",
    "decoder_norm/scale": "decoder.final_layer_norm.weight",
}
EMBEDDING, LOGITS = "token_embedder/embedding", "logits_dense/kernel"
# Other names of the shared table, and arrays that T5's code ignores.
TABLES = ("shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
UNREAD = re.compile(r".*\.EncDecAttention\.relative_attention_bias\.weight")


def family_of(config: Config) -> Family:
    """Returns the architecture of a config.json. Raises InputError if it is not T5's family."""
    kind = config.get("model_type")
    if str(kind) in FAMILIES:
        return FAMILIES[str(kind)]
    has = _OTHERS.get(str(kind))
    raise InputError(
        f"model_type = {kind!r}: must be one of T5's family ({', '.join(FAMILIES)})"
        + (f"; this one has {has}, which m4's model has not" if has else "")
    )


def settings_of(config: Config) -> dict[str, Any]:
    """Returns the equivalent settings of m4's `Transformer`. Raises InputError if none exist."""
    family = family_of(config)
    given = {**_DEFAULTS, "num_decoder_layers": config.get("num_layers"), **config}
    found: dict[str, Any] = {name: _number(given, key) for name, key in SIZES.items()}
    # Switch Transformers has no feed_forward_proj.
    key = "dense_act_fn" if family.experts else "feed_forward_proj"
    if (projection := config.get(key, family.projection)) not in ACTIVATIONS:
        raise InputError(f"{key} = {projection!r}: must be one of {', '.join(ACTIVATIONS)}")
    if (epsilon := config.get("layer_norm_epsilon", 1e-6)) != 1e-6:
        raise InputError(f"layer_norm_epsilon = {epsilon}: must be 1e-06, as m4's is")
    return {
        **found,
        "activations": ACTIVATIONS[projection],
        "tied_logits": bool(config.get("tie_word_embeddings", family.tied)),
        "relative_bias": family.relative_bias,
        "absolute_positions": False,
        "source_vocab_size": None,
    }


def experts_of(config: Config) -> dict[str, int] | None:
    """Returns num_experts and moe_every of a Switch Transformer, or None for a dense model."""
    if not family_of(config).experts:
        return None
    every = {key: _number(config, key) for key in ("encoder_sparse_step", "decoder_sparse_step")}
    if len({*every.values()}) > 1 or max(every.values()) > 2:
        raise InputError(f"{every}: must be both 1, or both 2, as m4's moe_every")
    if config.get("router_bias"):
        raise InputError("router_bias = true: must be false, m4's router has no bias")
    return {"num_experts": _number(config, "num_experts"), "moe_every": max(every.values())}


def ids_of(config: Config) -> tuple[int, int, int]:
    """Returns the ids of pad, eos and the decoder's start."""
    pad, eos, start = (_number({**IDS, **config}, key, 0) for key in IDS)
    return pad, eos, start


def _number(config: Config, key: str, least: int = 1) -> int:
    found = config.get(key)
    if type(found) is not int or not least <= found <= _LARGEST:
        raise InputError(f"{key} = {found!r}: must be a whole number from {least} to {_LARGEST}")
    return found


class HfParameter(NamedTuple):
    """Location of an m4 parameter: one array, or the experts' arrays in order."""

    names: tuple[str, ...]
    transposed: bool
    factor: float
    experts: bool

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of each array, for an m4 parameter of `shape`."""
        shape = shape[self.experts :]
        return shape[::-1] if self.transposed else shape

    def read(self, array: Callable[[str], np.ndarray]) -> np.ndarray:
        """Returns m4's parameter in float32."""
        found = [array(name).astype(np.float32, copy=False) for name in self.names]
        if self.transposed:
            found = [np.ascontiguousarray(one.T) for one in found]
        made = np.stack(found) if self.experts else found[0]
        if self.factor != 1.0:
            made *= np.float32(self.factor)
        return made

    def written(self, array: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        """Yields the arrays of m4's parameter with their names."""
        if self.factor != 1.0:
            array = array / array.dtype.type(self.factor)
        for name, one in zip(self.names, array if self.experts else [array], strict=True):
            yield name, one.T if self.transposed else one


def place(path: str, shape: tuple[int, ...], model: Transformer) -> HfParameter | None:
    """Returns the location of a parameter, by m4's path with unscanned layers, or None."""
    factor = t5_factor(path, model.width, model.head_width)
    turned = path.endswith(("/kernel", "/rel_embedding"))
    if path in _OUTSIDE:
        return HfParameter((_OUTSIDE[path],), turned, factor, False)
    match = re.fullmatch(r"(encoder|decoder)_(\d+)/(\w+)/(.+)", path)
    if match is None:
        return None
    names_of, last = _LAYERS[match[1]]
    forward = {"mlp": "", "moe": "", "pre_mlp_layer_norm": ".layer_norm"}
    known = {**names_of, **{name: f"layer.{last}{more}" for name, more in forward.items()}}
    if match[3] not in known:
        return None
    at = f"{match[1]}.block.{match[2]}.{known[match[3]]}"
    kind, inner = match[3], match[4].removesuffix("/kernel")
    if kind == "moe" and (part := re.fullmatch(r"experts/(wi|wo)", inner)):
        names = [f"{at}.mlp.experts.expert_{e}.{part[1]}.weight" for e in range(shape[0])]
        return HfParameter(tuple(names), turned, factor, True)
    dense = "DenseReluDense" if model.moe is None else "mlp"
    more = f".{dense}.{inner}" if kind == "mlp" else _INSIDE.get(inner)
    if more is None or (kind == "moe") != (inner == "router"):
        return None
    return HfParameter((f"{at}{more}.weight",), turned, factor, False)


def config_of(model: Transformer) -> dict[str, Any]:
    """Returns the config.json of an m4 model. InputError: Hugging Face has no such model."""
    experts = model.encoder_experts
    projections = {found: name for name, found in reversed(ACTIVATIONS.items())}
    gate = None
    if experts is not None:
        gate = getattr(getattr(experts.gate, "func", experts.gate), "__name__", "of its own")
    for wrong, why in (
        (model.absolute_positions, "absolute positions"),
        (model.source_vocab_size is not None, "separate vocabularies"),
        (model.activations not in projections, f"the activations {model.activations}"),
        (gate not in (None, "switch"), f"experts with the gate {gate}"),
        (experts is not None and model.activations != ("relu",), "experts that are gated"),
        (experts is not None and experts.shared_width, "a shared expert"),
        (experts is not None and model.decoder_moe is not None, "another decoder_moe"),
        (experts is not None and model.moe_every > 2, f"experts in each {model.moe_every}th layer"),
        (experts is not None and experts.mlp_width != model.mlp_width, "experts of another width"),
        (experts is not None and model.relative_bias != "shared", "experts and every layer's bias"),
    ):
        if wrong:
            raise InputError(f"it has {why}, which Hugging Face's T5 has not")
    kind = "switch_transformers" if experts is not None else "t5"
    if model.relative_bias == "every_layer":
        kind = "umt5"
    found = {
        "architectures": [FAMILIES[kind].architecture], "model_type": kind,
        **{key: getattr(model, name) for name, key in SIZES.items()}, **IDS,
        "dropout_rate": model.dropout_rate, "feed_forward_proj": projections[model.activations],
        "is_encoder_decoder": True, "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": model.tied_logits, "dtype": "float32",
    }  # fmt: skip
    if experts is not None:
        del found["feed_forward_proj"]
        layers = {stack: getattr(model, f"{stack}_layers") for stack in ("encoder", "decoder")}
        found |= {
            "dense_act_fn": "relu",
            "num_experts": experts.num_experts,
            **{f"{stack}_sparse_step": model.moe_every for stack in layers},
            **{f"num_sparse_{s}_layers": layers[s] // model.moe_every for s in layers},
            "router_bias": False,
            "router_jitter_noise": 0.0,
            "router_dtype": "float32",
            # No token is dropped, as in m4's evaluation.
            "expert_capacity": 2**20,
        }
    return found
