"""The encoder-decoder with mixture-of-experts layers: jax and flax only."""
