"""Phrases from Babel's Unicode CLDR tables, for the source `cldr`."""
