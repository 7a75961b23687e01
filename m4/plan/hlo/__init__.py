"""Reads compiled programs: collectives, matrix products, loops."""
