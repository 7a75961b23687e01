"""From text to batches: sources, cleaning, vocabularies, caches, streams; without jax and flax."""
