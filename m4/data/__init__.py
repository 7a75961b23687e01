"""Text in, batches out: sources, vocabulary, tasks, streams. Never jax or flax."""
