"""Scores and ΔBLEU."""
