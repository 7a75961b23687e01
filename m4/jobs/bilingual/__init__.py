"""The bilingual baselines: which there are, their training, and how far it is."""
