"""The bilingual baselines: which there are, and their training."""
