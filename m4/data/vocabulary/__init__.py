"""Subword vocabularies and tokenization."""
