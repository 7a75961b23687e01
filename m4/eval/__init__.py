"""Decoding, scores, ΔBLEU, plots and reports."""
