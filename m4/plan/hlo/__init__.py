"""Compiled programs read: collectives, matrix products, loops."""
