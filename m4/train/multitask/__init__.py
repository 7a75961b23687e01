"""Directions as tasks: their weights, rates and gradients."""
