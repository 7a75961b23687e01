"""Tests of the dispatch implementations: what they have in common is in shared.py."""
