"""Measurements and counts in training: losses, loads, data, dev, time."""
