"""The commands of `m4 data`: they build or inspect the corpus without an accelerator."""
