"""Phrases from the Unicode CLDR tables that Babel carries: what the source `cldr` is made of."""
