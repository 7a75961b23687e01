"""Directions as tasks: their loss weights, learning rates and gradients."""
