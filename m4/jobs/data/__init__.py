"""The commands of `m4 data`: they build or inspect the corpus, and touch no accelerator."""
