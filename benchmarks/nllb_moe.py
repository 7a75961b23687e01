"""The NLLB-MoE that peer_train_step.py and peer_decode.py run."""

from typing import Any

HEADS, LAYERS, VOCAB = 4, 4, 8192


def nllb_moe_of(width: int, mlp_width: int, experts: int, **more: Any):
    """Returns a model with experts in every other layer, without random skipping of layers."""
    import transformers  # type: ignore[import-not-found]

    config = transformers.NllbMoeConfig(
        vocab_size=VOCAB,
        d_model=width,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_ffn_dim=mlp_width,
        decoder_ffn_dim=mlp_width,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        num_experts=experts,
        second_expert_policy="all",
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        **more,
    )
    return transformers.NllbMoeForConditionalGeneration(config)
