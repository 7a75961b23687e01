"""Measurements in training: losses, expert loads, data, dev losses and time."""
